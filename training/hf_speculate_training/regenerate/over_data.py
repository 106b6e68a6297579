"""`hf-speculate generate --data`: every prompt of a dataset answered, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from hf_speculate.commands import make_spec, parse_spec
from hf_speculate.errors import SpeculateError
from hf_speculate.models import unwrap

from ..data import Records, load_records
from ..target import TargetSection, load_config, load_target, load_tokenizer
from .cluster import RayEngine
from .engine import Engine
from .local import LocalEngine
from .planning import Planner, RegenerateOptions
from .writing import write_answers


_SPEC = "prompt_lookup"  # fits every target


def generate_over_data(
    data: str,
    output: Path,
    *,
    target: str,
    speculator: str | None,
    sampling: dict[str, Any],
    raw: bool,
    limit: int | None,
    batch_size: int,
    dtype: str,
    device: torch.device,
    engine: str,
    actors: int,
    exact: bool = False,
) -> dict[str, Any]:
    """Writes JSON lines: `id` (the record's number), `messages` or `prompt` and `completion`, `finish`. A run that was
    stopped goes on where it was.

    Args:
        data: file, folder, pattern or Hub id, see `load_records`.
        output: the file.
        speculator: NAME_OR_PATH:option=value,...; "none" for plain; None: prompt lookup.
        sampling: fields of `RegenerateOptions`: `max_new_tokens`, `temperature`, `top_p`, `top_k`, `seed`.
        raw: no chat template.
        batch_size: prompts at a time, of about the same length.
        engine: "local", or "ray" with so many `actors`.
        exact: with the speculator's `exact=True`.
    Returns:
        Figures of the run, JSON-serialisable.
    Raises:
        SpeculateError: no such data or target; an output of other data, target or settings.
    """
    if engine not in ("local", "ray"):
        raise SpeculateError(f"--engine {engine}: possible are local and ray.")
    logging.disable_progress_bar()  # of transformers: "Loading weights"
    section = TargetSection(path=target, dtype=dtype)  # type: ignore[arg-type]
    records, tokenizer = _prompts(load_records(data, limit=limit)), load_tokenizer(section)
    options = RegenerateOptions(batch_size=batch_size, chat=bool(tokenizer.chat_template) and not raw, **sampling)
    spec = None if speculator == "none" else speculator or _SPEC
    if exact and spec is not None:
        spec = parse_spec(spec).with_option("exact", True).text
    answering: Engine
    if engine == "ray":
        config = load_config(section)
        answering = RayEngine(section, options, spec, actors=actors, gpus=float(device.type != "cpu"))
    else:
        model = load_target(section, device)
        config = unwrap(model).config
        drafting = None if spec is None else make_spec(parse_spec(spec), unwrap(model))
        answering = LocalEngine(model, tokenizer, options, drafting)
    report = write_answers(answering, Planner(tokenizer, config, options), records, output, text_only=True)
    figures = vars(report) | {"skipped": dict(report.skipped), "output": str(output)}
    return figures | {"mean_acceptance_length": answering.mean_acceptance_length()}


def _prompts(records: Records) -> Records:
    """A text is a prompt, all of it."""
    names = records.column_names or []
    return records.rename_column("text", "prompt") if "text" in names and "prompt" not in names else records
