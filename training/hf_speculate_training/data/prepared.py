"""Documents that are ready to be trained on, and what became of the records that they were made from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from datasets import Dataset, IterableDataset

from hf_speculate.errors import SpeculateError

from .loading import Records
from .options import DataOptions
from .packing import RowDataset, StreamedRows


@dataclass(frozen=True)
class DataReport:
    """What became of the records; `None` counts are unknown because the data are streamed.

    Attributes:
        source: where they came from.
        fingerprint: sha256 over all documents that were kept (ids and masks, in order); of a stream, over its name.
        num_documents, num_tokens, num_loss_tokens: of training and evaluation together.
        num_eval_documents: those of them that are held out.
        num_given_tokens: of the records as they came, before anything was truncated or dropped.
        notes: how many documents were truncated or dropped, and why.
    """

    source: str
    fingerprint: str
    num_documents: int | None = None
    num_tokens: int | None = None
    num_loss_tokens: int | None = None
    num_eval_documents: int | None = None
    num_given_tokens: int | None = None
    notes: Mapping[str, int] = field(default_factory=dict)

    def summary(self) -> str:
        """What of the data is used, in a line."""
        if not self.num_given_tokens or self.num_tokens is None:
            return f"{self.source}: streamed"
        share = self.num_tokens / self.num_given_tokens
        return (
            f"{self.source}: {self.num_documents} documents, {self.num_tokens:,} of {self.num_given_tokens:,} tokens "
            f"used ({share:.0%}), {self.num_loss_tokens:,} of them learnt from"
        )

    def to_dict(self) -> dict[str, Any]:
        """For provenance: JSON-serialisable."""
        return asdict(self)


@dataclass(frozen=True)
class PreparedData:
    """Documents of tokens: records with `input_ids`, `loss_mask`, `length` and `loss_tokens`.

    Attributes:
        train, evaluation: `datasets` objects; `evaluation` is None when nothing is held out.
        max_length: the longest that a document can be.
        options: as given.
    """

    train: Records
    evaluation: Records | None
    max_length: int
    report: DataReport
    options: DataOptions

    def rows(self, which: Literal["train", "evaluation"] = "train") -> RowDataset | StreamedRows:
        """Rows for `Collator`, packed if the options say so."""
        documents: Any = self.train if which == "train" else self.evaluation
        if documents is None:
            raise SpeculateError("no data are held out: set eval_fraction, or give evaluation data of their own.")
        make = StreamedRows if isinstance(documents, IterableDataset) else RowDataset
        return make(documents, self.max_length, self.options.packing)


def documents_fingerprint(documents: Dataset) -> str:
    """sha256 over ids and masks of all documents, in order."""
    digest = hashlib.sha256()
    for batch in documents.select_columns(["input_ids", "loss_mask"]).with_format("arrow").iter(1000):
        for name, kind in (("input_ids", np.int32), ("loss_mask", np.bool_)):
            column = batch[name].combine_chunks()  # type: ignore[attr-defined]
            digest.update(np.asarray(column.value_lengths(), dtype=np.int32).tobytes())
            digest.update(column.flatten().to_numpy(zero_copy_only=False).astype(kind).tobytes())
    return digest.hexdigest()
