"""Engines that answer prompts. This module has their interface, and the one that runs in this process.

The process that calls an engine plans the batches and writes the file, alone. So nothing is lost and nothing is written
twice, whatever an engine has to do again.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig

from hf_speculate.speculator import Speculator
from hf_speculate.target import GenerativeModel

from ..data import Encoder
from ..target import target_fingerprint
from .answers import Job
from .planning import RegenerateOptions, longest_prompt


class Engine(ABC):
    """Answers batches of jobs.

    Class attributes:
        answers_whole_batches: whether an answer depends on its batch. Then a batch with some jobs that are done already
            is answered again as a whole, else without these.
    """

    answers_whole_batches: ClassVar[bool]

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Settings besides data and options, JSON-serialisable: an engine with others does not resume a file."""

    @abstractmethod
    def answered(self, batches: Iterable[list[Job]]) -> Iterator[list[Job]]:
        """Answers jobs; yields them as they are ready, in any order and grouping.

        Raises:
            SpeculateError: some could not be answered; the jobs before are right.
        """

    def mean_acceptance_length(self) -> float | None:
        """Tokens that a round with a draft emitted so far; None where that is not known."""
        return None


class LocalEngine(Engine):
    """The target in this process: `model.generate`, batch by batch, with a speculator; see `regenerate`."""

    answers_whole_batches = True  # sampled rows then draw the same numbers as in the first run

    def __init__(
        self,
        target: GenerativeModel,
        tokenizer: Any,
        options: RegenerateOptions,
        speculator: Speculator | None = None,
        end_ids: Collection[int] = (),
    ):
        self.target, self.options, self.speculator = target, options, speculator
        self._config = _generation_config(self.target.generation_config, tokenizer, options)
        self._end_ids = _end_ids(self._config) | set(end_ids)
        self._config.eos_token_id = sorted(self._end_ids) or None
        self._encoder = Encoder(tokenizer=tokenizer)
        self._longest_prompt = longest_prompt(tokenizer, self.target.config, options)

    def settings(self) -> dict[str, Any]:
        return {"target": target_fingerprint(self.target)}

    def answered(self, batches: Iterable[list[Job]]) -> Iterator[list[Job]]:
        for batch in batches:
            self.answer(batch)
            yield batch

    def mean_acceptance_length(self) -> float | None:
        return None if self.speculator is None else self.speculator.stats.mean_acceptance_length

    def answer(self, batch: list[Job]) -> None:
        """Answers every turn of every job."""
        prompts = [(job, job.start()) for job in batch]
        turn = 0
        while prompts:
            answers = self._generate([ids for _, ids in prompts], seed=self._seed(prompts, turn))
            for (job, _), answer in zip(prompts, answers, strict=True):
                job.take(answer, answer[-1] in self._end_ids, self._encoder)
            asked = [(job, job.ask(self._encoder, self._longest_prompt)) for job, _ in prompts if not job.finish]
            prompts = [(job, ids) for job, ids in asked if ids is not None]
            turn += 1

    def _seed(self, prompts: list[tuple[Job, list[int]]], turn: int) -> int:
        name = f"{self.options.seed} {turn} {' '.join(job.id for job, _ in prompts)}"
        return int(hashlib.sha256(name.encode()).hexdigest()[:15], 16)

    def _generate(self, prompts: list[list[int]], seed: int) -> list[list[int]]:
        """New tokens of each row, up to its end token."""
        width, device = max(map(len, prompts)), self.target.device
        padding = self._config.pad_token_id
        ids = torch.tensor(
            [[padding] * (width - len(prompt)) + prompt for prompt in prompts], dtype=torch.long, device="cpu"
        )
        mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=torch.long, device="cpu"
        )
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            output = self.target.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                generation_config=self._config,
                speculator=self.speculator,
            )
        return [self._until_end(row) for row in output[:, width:].tolist()]

    def _until_end(self, tokens: list[int]) -> list[int]:
        end = next((place for place, token in enumerate(tokens) if token in self._end_ids), len(tokens) - 1)
        return tokens[: end + 1]


def _generation_config(base: GenerationConfig | None, tokenizer: Any, options: RegenerateOptions) -> GenerationConfig:
    """The model's own generation config, with the values of the options; lengths are ours."""
    config = copy.deepcopy(base) or GenerationConfig()
    config.max_length = config.min_length = config.min_new_tokens = None
    config.return_dict_in_generate = False
    config.max_new_tokens = options.max_new_tokens
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer.eos_token_id
    if config.pad_token_id is None:
        config.pad_token_id = next((i for i in (tokenizer.pad_token_id, *sorted(_end_ids(config))) if i is not None), 0)
    if options.temperature is not None:
        config.do_sample = options.temperature > 0
        config.temperature = options.temperature or None
        config.top_p, config.top_k = (options.top_p, options.top_k) if config.do_sample else (None, None)
    return config


def _end_ids(config: GenerationConfig) -> frozenset[int]:
    ids: Any = config.eos_token_id
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)
