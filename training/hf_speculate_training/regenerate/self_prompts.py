"""Prompts without a dataset: the target writes messages that a user might send.

A chat model that gets its template up to where the user speaks, and nothing more, continues with a user's message: it
was trained on whole conversations (Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn

from hf_speculate.errors import SpeculateError
from hf_speculate.messages import get_logger
from hf_speculate.speculator import Speculator

from ..data import Encoder
from .journal import read_lines
from .planning import RegenerateOptions
from .writing import regenerate


logger = get_logger(__name__)


SAMPLING = RegenerateOptions(temperature=1.0, top_p=0.95, max_new_tokens=128, batch_size=64)


def write_self_prompts(
    target: nn.Module,
    tokenizer: Any,
    output: str | Path,
    count: int,
    options: RegenerateOptions = SAMPLING,
    *,
    speculator: Speculator | None = None,
    show_progress: bool | None = None,
) -> tuple[Dataset, Counter[str]]:
    """Draws messages of users from the target; resumes a run that was stopped.

    Args:
        output: file for JSON lines of all messages, dropped ones included.
        count: number of messages to draw; fewer are kept.
        options: options of the sampling. Messages that reach `max_new_tokens` are dropped.
        others: parameters of `regenerate`.
    Returns:
        Records with one column, `prompt`, in the order of drawing; and numbers of dropped messages, by reason.
    Raises:
        SpeculateError: no chat template, or one whose user's turn ends in text; nothing was kept; as `regenerate`.
    """
    if not options.temperature:
        raise SpeculateError("Self-written prompts must be sampled; greedy decoding would repeat one prompt.")
    prefix, end_id = Encoder(tokenizer=tokenizer).user_turn()
    # The end token stands for the message.
    record = {"input_ids": [*prefix, end_id], "loss_mask": [0] * len(prefix) + [1]}
    regenerate(
        target,
        tokenizer,
        Dataset.from_list([record] * count),
        output,
        options,
        speculator=speculator,
        end_ids=(end_id,),
        show_progress=show_progress,
    )
    lines = sorted(read_lines(Path(output)), key=lambda line: int(line["id"]))
    kept, dropped = _kept(lines)
    if not kept:
        raise SpeculateError(f"none of the {count} self-written prompts can be used: {dict(dropped)}.")
    logger.info(f"{len(kept)} self-written prompts; dropped: {dict(dropped)}")
    return Dataset.from_dict({"prompt": kept}), dropped


def _kept(lines: list[dict[str, Any]]) -> tuple[list[str], Counter[str]]:
    """Messages that came to their end, each once, whatever its case and blanks; and numbers of the others."""
    kept: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    for line in lines:
        text = line["completion"].strip()
        key = " ".join(text.casefold().split())
        if line["finish"] != "stop":
            dropped["no end"] += 1
        elif not key:
            dropped["empty"] += 1
        elif key in kept:
            dropped["a duplicate"] += 1
        else:
            kept[key] = text
    return list(kept.values()), dropped
