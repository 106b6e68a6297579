"""Answers by actors of a Ray cluster (Ray Data): each holds a target and a speculator, and takes batches.

An answer depends on its batch alone, so another actor can answer the batch of an actor that died, with the same text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from logging import getLogger
from typing import Any

import torch

from hf_speculate.errors import SpeculateError, first_line
from hf_speculate.messages import get_logger
from hf_speculate.target import GenerativeModel
from hf_speculate_tools.commands import make_spec, parse_spec

from ..target import TargetSection, load_target, load_tokenizer
from .answers import Document, Job
from .engine import Engine, LocalEngine
from .planning import RegenerateOptions


logger = get_logger(__name__)

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}
_MOST_BLOCKS = 4096  # Ray does a block again where an actor dies


class RayEngine(Engine):
    """A pool of actors, on a cluster that `ray.init` has found already, or on this machine.

    Each loads the target and a speculator (NAME_OR_PATH:option=value,…), and has `cpus` threads or `gpus`. A batch that
    raised is tried again, `retries` times.
    """

    answers_whole_batches = True  # as in one process

    def __init__(
        self,
        section: TargetSection,
        options: RegenerateOptions,
        speculator: str | None = None,
        *,
        actors: int = 1,
        cpus: float = 1.0,
        gpus: float = 0.0,
        retries: int = 5,
    ):
        if find_spec("ray") is None:
            raise SpeculateError("--engine ray needs Ray: pip install 'hf-speculate[ray]'")
        self._given = (section, options, speculator, cpus, gpus > 0)
        self._actors, self._resources, self._retries = actors, {"num_cpus": cpus, "num_gpus": gpus}, retries
        self._tokens = self._rounds = 0

    def settings(self) -> dict[str, Any]:
        """Settings as those of `LocalEngine`: either resumes the other's file. An actor loads the target."""
        with _cluster() as ray:
            fingerprint: Any = ray.remote(**self._resources)(_fingerprint).remote(*self._given)
            return {"target": ray.get(fingerprint)}

    def answered(self, batches: Iterable[list[Job]]) -> Iterator[list[Job]]:
        rows = [{"jobs": json.dumps([asdict(job) for job in batch])} for batch in batches]
        if not rows:
            return
        with _cluster() as ray:
            ray.data.DataContext.get_current().enable_progress_bars = False
            data = ray.data.from_items(rows, override_num_blocks=min(len(rows), _MOST_BLOCKS))
            answered = data.map_batches(
                AnsweringActor,
                fn_constructor_args=(*self._given, self._retries),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=self._actors),
                **self._resources,
            )
            for row in answered.iter_rows():  # another actor does again what a dead one had begun: Ray's default
                if row["problem"]:
                    raise SpeculateError(f"an actor could not answer a batch: {row['problem']}")
                self._tokens += row["tokens"]
                self._rounds += row["rounds"]
                yield [_job(each) for each in json.loads(row["jobs"])]

    def mean_acceptance_length(self) -> float | None:
        return self._tokens / self._rounds if self._rounds else None


class AnsweringActor:
    """An actor: it holds target and speculator, and answers batches of rows."""

    def __init__(
        self,
        section: TargetSection,
        options: RegenerateOptions,
        speculator: str | None,
        cpus: float,
        on_gpu: bool,
        retries: int = 0,
    ):
        self._retries = retries
        target = _target(section, cpus, on_gpu)
        self._speculator = None if speculator is None else make_spec(parse_spec(speculator), target)
        self._engine = LocalEngine(target, load_tokenizer(section), options, self._speculator)

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[Any]]:
        """Answers the jobs of each row; adds the number of rounds with a draft and of their tokens, or the error."""
        answered: dict[str, list[Any]] = {"jobs": [], "tokens": [], "rounds": [], "problem": []}
        for text in rows["jobs"]:
            before = self._counts()
            jobs, problem = self._answered(str(text))
            counts = [now - earlier for now, earlier in zip(self._counts(), before, strict=True)]
            for name, value in zip(answered, (jobs, *counts, problem), strict=True):
                answered[name].append(value)
        return answered

    def fingerprint(self) -> str:
        """Fingerprint of the target, as it was loaded here."""
        return self._engine.settings()["target"]

    def _answered(self, text: str) -> tuple[str, str]:
        """The answered jobs and "", or "" and the error of the last attempt."""
        problem = ""
        for attempt in range(self._retries + 1):
            batch = [_job(each) for each in json.loads(text)]
            try:
                self._engine.answer(batch)
                return json.dumps([asdict(job) for job in batch]), ""
            except Exception as error:
                problem = f"{type(error).__name__}: {first_line(error)} (attempt {attempt + 1})"
                logger.warning(problem)
        return "", problem

    def _counts(self) -> tuple[int, int]:
        if self._speculator is None:
            return 0, 0
        stats = self._speculator.stats
        return stats.accepted_tokens + stats.bonus_tokens, stats.rounds


def _target(section: TargetSection, cpus: float, on_gpu: bool) -> GenerativeModel:
    if on_gpu:
        return load_target(section, torch.accelerator.current_accelerator() or torch.device("cpu"))
    torch.set_num_threads(max(int(cpus), 1))
    return load_target(section, torch.device("cpu"))


def _fingerprint(*given: Any) -> str:
    """Fingerprint of the target; raises if an actor cannot load target or speculator."""
    return AnsweringActor(*given).fingerprint()


def _job(values: dict[str, Any]) -> Job:
    return Job(**{**values, "documents": [Document(**each) for each in values["documents"]]})


@contextmanager
def _cluster() -> Iterator[Any]:
    """Ray, as it was set up already, or quietly on this machine and for this time."""
    ray: Any = import_module("ray")
    import_module("ray.data")
    was_there = ray.is_initialized()
    if not was_there:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        getLogger("ray.data").setLevel("ERROR")
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield ray
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise SpeculateError(f"Ray ended the run: {type(cause).__name__}: {first_line(cause)}") from error
    finally:
        if not was_there:
            ray.shutdown()
