"""Options for reading data, the documents that are made of them, and an account of the records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from datasets import Dataset
from transformers import PretrainedConfig

from hf_speculate.errors import SpeculateError

from .packing import RowDataset


DEFAULT_MAX_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options for reading data.

    Attributes:
        max_length: tokens of a document and of a row at most; None for the target's context, at most 2048.
        long: treatment of longer documents. "truncate" keeps their beginning; "drop" leaves them out; "split" makes
            pieces, of which none sees the one before; "auto" splits plain texts and truncates the rest.
        chat: True renders `prompt` and `completion` as a chat if they are mere texts.
        turns, append_eos: options of `Encoder`.
        packing: True puts several documents into a row, see `best_fit_decreasing`.
        eval_fraction: share of the records that is held out. A hash of the content and `seed` chooses, so the same
            record is always on the same side. If a side of a few plain texts would be empty, pieces are held out.
        seed: seed of that choice.
        columns, split, config, revision, limit: options of `load_records`.
        num_proc: processes that tokenise; None for this one.
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
    limit: int | None = None
    num_proc: int | None = None

    def __post_init__(self) -> None:
        for name, possible in (("long", ("auto", "truncate", "drop", "split")), ("turns", ("together", "separate"))):
            if getattr(self, name) not in possible:
                raise SpeculateError(f"data option {name}={getattr(self, name)!r}: possible are {', '.join(possible)}.")
        if not 0 <= self.eval_fraction < 1:
            raise SpeculateError(f"eval_fraction must be at least 0 and below 1, got {self.eval_fraction}.")


def context_length(tokenizer: Any, config: PretrainedConfig | None) -> int | None:
    """Number of positions that the target was made for; None if neither tokenizer nor configuration has it."""
    known = []
    if config is not None:
        known.append(getattr(config.get_text_config(decoder=True), "max_position_embeddings", None))
    known.append(tokenizer.model_max_length)
    sizes = [size for size in known if isinstance(size, int) and 0 < size < 10**9]  # tokenizers have 1e30 for unknown
    return min(sizes) if sizes else None


def resolve_max_length(asked: int | None, tokenizer: Any, config: PretrainedConfig | None) -> int:
    """The length that was asked for, or the default; raises `SpeculateError` if the target cannot take it."""
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


@dataclass(frozen=True)
class DataReport:
    """An account of the records: training and evaluation together."""

    source: str
    fingerprint: str  # sha256 over ids and masks of all documents that were kept, in order
    num_documents: int
    num_tokens: int
    num_loss_tokens: int
    num_given_tokens: int  # before anything was truncated or dropped
    num_eval_documents: int | None = None
    notes: Mapping[str, int] = field(default_factory=dict)  # reason -> documents that were truncated or dropped

    def summary(self) -> str:
        """The share of the data that is used, in a line."""
        share = self.num_tokens / self.num_given_tokens
        return (
            f"{self.source}: {self.num_documents} documents, {self.num_tokens:,} of {self.num_given_tokens:,} tokens "
            f"used ({share:.0%}), {self.num_loss_tokens:,} of them learnt from"
        )


@dataclass(frozen=True)
class PreparedData:
    """Documents of tokens: records with `input_ids`, `loss_mask`, `length` and `loss_tokens`.

    `evaluation` is None when nothing is held out.
    """

    train: Dataset
    evaluation: Dataset | None
    max_length: int
    report: DataReport
    options: DataOptions

    def rows(self) -> RowDataset:
        """Rows of the training data for `Collator`, packed if the options ask for it."""
        return RowDataset(self.train, self.max_length, self.options.packing)


def documents_fingerprint(documents: Dataset) -> str:
    """sha256 over ids and masks of all documents, in order."""
    digest = hashlib.sha256()
    for batch in documents.select_columns(["input_ids", "loss_mask"]).with_format("arrow").iter(1000):
        for name, kind in (("input_ids", np.int32), ("loss_mask", np.bool_)):
            column = batch[name].combine_chunks()  # type: ignore[attr-defined]
            digest.update(np.asarray(column.value_lengths(), dtype=np.int32).tobytes())
            digest.update(column.flatten().to_numpy(zero_copy_only=False).astype(kind).tobytes())
    return digest.hexdigest()


def content_fingerprint(content: Any) -> str:
    """sha256 over something JSON-serialisable."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
