"""How data are read, and how long documents can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PretrainedConfig

from hf_speculate.errors import SpeculateError


DEFAULT_MAX_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How data are read.

    Attributes:
        max_length: tokens of a document at most, and of a row; None: the target's context, at most 2048.
        long: what becomes of longer ones: "truncate" keeps their beginning, "drop", "split" makes pieces of them
            (a piece does not see the one before); "auto" splits plain texts, a text file among them, of which
            truncation would lose all but the beginning, and truncates the rest.
        chat: `prompt` and `completion` that are mere texts are rendered as a chat.
        turns, append_eos: see `Encoder`.
        packing: several documents a row, see `best_fit_decreasing`.
        eval_fraction: share of the records that is held out, chosen by a hash of the content and `seed`: the same
            record is always on the same side. Where the data are so few plain texts that one side would be empty, it
            is their pieces that are held out.
        columns, split, config, revision, streaming, limit: see `load_records`.
        num_proc: processes that tokenise.
    """

    max_length: int | None = None
    long: Literal["auto", "truncate", "drop", "split"] = "auto"
    chat: bool = False
    turns: Literal["together", "separate"] = "together"
    append_eos: bool = True
    packing: bool = True
    eval_fraction: float = 0.0
    seed: int = 0
    columns: Mapping[str, str] = field(default_factory=dict)
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    streaming: bool = False
    limit: int | None = None
    num_proc: int | None = None

    def __post_init__(self) -> None:
        for name, possible in (("long", ("auto", "truncate", "drop", "split")), ("turns", ("together", "separate"))):
            if getattr(self, name) not in possible:
                raise SpeculateError(f"data option {name}={getattr(self, name)!r}: possible are {', '.join(possible)}.")
        if not 0 <= self.eval_fraction < 1:
            raise SpeculateError(f"eval_fraction must be at least 0 and below 1, got {self.eval_fraction}.")


def context_length(tokenizer: Any, config: PretrainedConfig | None) -> int | None:
    """Positions that the target was made for, None if nobody says."""
    known = []
    if config is not None:
        known.append(getattr(config.get_text_config(decoder=True), "max_position_embeddings", None))
    known.append(tokenizer.model_max_length)
    sizes = [size for size in known if isinstance(size, int) and 0 < size < 10**9]  # tokenizers say 1e30 for unknown
    return min(sizes) if sizes else None


def resolve_max_length(asked: int | None, tokenizer: Any, config: PretrainedConfig | None) -> int:
    """The length that was asked for, or the default; raises `SpeculateError` where the target cannot take it."""
    context = context_length(tokenizer, config)
    if asked is None:
        return min(DEFAULT_MAX_LENGTH, context or DEFAULT_MAX_LENGTH)
    if asked < 2:
        raise SpeculateError(f"max_length must be at least 2, got {asked}.")
    if context is not None and asked > context:
        raise SpeculateError(
            f"max_length={asked} was asked for, but the target's context is {context} tokens: at most that is possible."
        )
    return asked
