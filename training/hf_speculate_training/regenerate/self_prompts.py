"""Prompts without a dataset: the target writes messages that a user might send.

A chat model that gets its template up to where the user speaks, and nothing more, continues with a user's message: it
was trained on whole conversations (Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class SelfPromptOptions:
    """Options for drawing messages.

    Attributes:
        count: number of messages to draw; fewer are kept.
        temperature, top_p: temperature and limit of the sampling.
        max_new_tokens: maximum number of tokens of a message; longer ones are dropped.
        batch_size: rows at a time.
        seed: seed of the sampling.
    """

    count: int
    temperature: float = 1.0
    top_p: float = 0.95
    max_new_tokens: int = 128
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SpeculateError(f"the number of self-written prompts must be at least 1, got {self.count}.")
        if not self.temperature > 0:
            raise SpeculateError("Self-written prompts must be sampled; greedy decoding would repeat one prompt.")


def write_self_prompts(
    target: nn.Module,
    tokenizer: Any,
    output: str | Path,
    options: SelfPromptOptions,
    *,
    speculator: Speculator | None = None,
    show_progress: bool | None = None,
) -> tuple[Dataset, Counter[str]]:
    """Draws messages of users from the target; resumes a run that was stopped.

    Args:
        output: file for JSON lines of all messages, dropped ones included.
        others: parameters of `regenerate`.
    Returns:
        Records with one column, `prompt`, in the order of drawing; and numbers of dropped messages, by reason.
    Raises:
        SpeculateError: no chat template, or one whose user's turn ends in text; nothing was kept; as `regenerate`.
    """
    prefix, end_id = Encoder(tokenizer=tokenizer).user_turn()
    # The end token stands for the message.
    record = {"input_ids": [*prefix, end_id], "loss_mask": [0] * len(prefix) + [1]}
    writing = RegenerateOptions(
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    records = Dataset.from_list([record] * options.count)
    regenerate(
        target,
        tokenizer,
        records,
        output,
        writing,
        speculator=speculator,
        end_ids=(end_id,),
        show_progress=show_progress,
    )
    lines = sorted(read_lines(Path(output)), key=lambda line: int(line["id"]))
    kept, dropped = _kept(lines)
    if not kept:
        raise SpeculateError(f"none of the {options.count} self-written prompts can be used: {dict(dropped)}.")
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
