"""`hf-speculate regenerate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_speculate_tools.commands import command_of, make_spec, parse_spec, read_prompts, say, say_json

from .settings import RegenerateSettings


if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from transformers import PretrainedConfig

    from ..target import TargetSection
    from .engine import Engine
    from .planning import RegenerateOptions


def answer_prompts(settings: RegenerateSettings) -> None:
    """Write training data: the target's own answers to prompts.

    Prompts come from a dataset, or from the target itself. Run the command again to resume.
    """
    import torch
    from transformers.utils import logging

    from ..data import HeldOut, load_records
    from ..target import load_tokenizer
    from .planning import Planner
    from .writing import write_answers

    options, records = _options(settings), None
    if settings.data is not None:
        records = load_records(
            settings.data,
            split=settings.split,
            config=settings.config,
            columns=settings.columns,
            limit=settings.limit,
        )
    held_out = HeldOut(_texts(settings.exclude)) if settings.exclude else None
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    logging.disable_progress_bar()  # of transformers: "Loading weights"
    section = _section(settings)
    tokenizer = load_tokenizer(section)
    engine, config = _ENGINES[settings.engine](settings, section, tokenizer, options)
    dropped: Mapping[str, int] = {}
    if records is None:
        records, dropped = _self_prompts(settings, tokenizer, engine)
    report = write_answers(engine, Planner(tokenizer, config, options, held_out), records, settings.output)
    counted = {"skipped": dict(report.skipped), "dropped_prompts": dict(dropped)}
    figures = vars(report) | counted | {"output": str(settings.output)}
    if (length := engine.mean_acceptance_length()) is not None:
        figures["mean_acceptance_length"] = length
    if advice := report.advice(options):
        say(advice, err=True)
    say_json(figures)


regenerate_command = command_of(RegenerateSettings, answer_prompts)


def _options(settings: RegenerateSettings) -> RegenerateOptions:
    from .planning import RegenerateOptions

    names = [field.name for field in fields(RegenerateOptions)]
    options = RegenerateOptions(**{name: getattr(settings, name) for name in names})
    return options if settings.self_prompts is None else replace(options, chat=True)


def _section(settings: RegenerateSettings) -> TargetSection:
    from ..target import TargetSection

    return TargetSection(
        path=settings.target,
        revision=settings.revision,
        dtype=settings.dtype,
        quantization=settings.quantization,
        gguf_file=settings.gguf_file,
        adapter=settings.adapter,
    )


def _server(
    settings: RegenerateSettings, section: TargetSection, tokenizer: Any, options: RegenerateOptions
) -> tuple[Engine, PretrainedConfig]:
    from ..target import load_config
    from .connection import Connection
    from .server import ServerEngine

    assert settings.server is not None
    connection = Connection(settings.server, timeout=settings.request_timeout, retries=settings.retries)
    config, model = load_config(section), settings.server_model
    engine = ServerEngine(connection, tokenizer, config, options, model=model, concurrency=settings.concurrency)
    return engine, config


def _cluster(
    settings: RegenerateSettings, section: TargetSection, tokenizer: Any, options: RegenerateOptions
) -> tuple[Engine, PretrainedConfig]:
    from ..target import load_config
    from .cluster import RayEngine

    config = load_config(section)
    engine = RayEngine(
        section,
        options,
        settings.drafter,
        actors=settings.actors,
        cpus=settings.actor_cpus,
        gpus=settings.actor_gpus,
        retries=settings.retries,
    )
    return engine, config


def _local(
    settings: RegenerateSettings, section: TargetSection, tokenizer: Any, options: RegenerateOptions
) -> tuple[Engine, PretrainedConfig]:
    from ..target import load_target
    from .engine import LocalEngine

    target = load_target(section, _device(settings.device))
    speculator = None if settings.drafter is None else make_spec(parse_spec(settings.drafter), target)
    return LocalEngine(target, tokenizer, options, speculator), target.config


_ENGINES = {"local": _local, "ray": _cluster, "server": _server}


def _self_prompts(settings: RegenerateSettings, tokenizer: Any, engine: Engine) -> tuple[Dataset, Mapping[str, int]]:
    """Prompts that the target writes itself, and numbers of dropped ones by reason."""
    from .engine import LocalEngine
    from .self_prompts import SAMPLING, write_self_prompts

    assert isinstance(engine, LocalEngine)
    assert settings.self_prompts is not None
    sampling = replace(SAMPLING, batch_size=settings.batch_size, seed=settings.seed)
    drawn = settings.output.with_name(settings.output.name + ".prompts")  # another suffix: these are not training data
    return write_self_prompts(
        engine.target, tokenizer, drawn, settings.self_prompts, sampling, speculator=engine.speculator
    )


def _texts(paths: Iterable[Path]) -> Iterator[str]:
    """Users' messages of prompt files."""
    for prompt in (prompt for path in paths for prompt in read_prompts(path)):
        yield from (message["content"] for message in prompt.messages if message["role"] == "user")
        yield from prompt.later_turns


def _device(name: str | None) -> torch.device:
    import torch

    if name is None and torch.accelerator.is_available():
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device(name or "cpu")
