"""Documents of tokens made from a source: encoded, cut to length, split into training and evaluation, counted."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PretrainedConfig

from hf_speculate.errors import SpeculateError
from hf_speculate.messages import get_logger

from . import encoding
from . import records as records_module
from .encoding import Encoded, Encoder
from .loading import Source, describe_source, load_records
from .prepared import (
    DataOptions,
    DataReport,
    PreparedData,
    content_fingerprint,
    documents_fingerprint,
    resolve_max_length,
)
from .records import Plain, RecordError, read_record


logger = get_logger(__name__)

_FEATURES = Features(
    {
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("bool")),
        "length": Value("int32"),
        "loss_tokens": Value("int32"),
        "bucket": Value("float64"),
        "note": Value("string"),
        "record": Value("int64"),
        "given": Value("int64"),
    }
)
_DROPPED = "dropped: "
_TRUNCATED = "truncated"
_NO_LOSS_TOKENS = "no assistant tokens"
_ENDLESS = "endless answers, which repeat themselves"  # `regenerate` marks them


def prepare_data(
    source: Source,
    tokenizer: Any,
    options: DataOptions | None = None,
    *,
    target_config: PretrainedConfig | None = None,
    end_ids: Collection[int] | None = None,
) -> PreparedData:
    """Reads, encodes and splits data.

    Args:
        source: a source as `load_records` takes it.
        tokenizer: the target's tokenizer.
        options: options for reading; None for the defaults.
        target_config: the target's configuration, for its context length and vocabulary; None checks neither.
        end_ids: tokens at which the target stops; None for the tokenizer's eos token.
    Raises:
        SpeculateError: there are no records, none that can be used, or none with a token that the target is to emit;
            `max_length` is beyond the target's context; a chat has no template.
    """
    options = options or DataOptions()
    max_length = resolve_max_length(options.max_length, tokenizer, target_config)
    records: Any = load_records(
        source,
        split=options.split,
        config=options.config,
        revision=options.revision,
        columns=options.columns,
        limit=options.limit,
    )
    name = describe_source(source)
    if end_ids is None:
        end_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    encoder = Encoder(
        tokenizer=tokenizer, end_ids=frozenset(end_ids), turns=options.turns, append_eos=options.append_eos
    )
    arguments = {
        "encoder": encoder,
        "code": _code_fingerprint(),
        "options": options,
        "max_length": max_length,
        "vocab_size": None if target_config is None else target_config.get_text_config(decoder=True).vocab_size,
    }
    documents = records.map(
        _encode_batch,
        remove_columns=records.column_names,
        num_proc=options.num_proc,
        desc="tokenising",
        batched=True,
        with_indices=True,
        fn_kwargs=arguments,
        features=_FEATURES,
    )
    notes = Counter(note for note in documents["note"] if note)
    kept = documents.select([i for i, note in enumerate(documents["note"]) if not note.startswith(_DROPPED)])
    _report_notes(notes, len(documents), len(kept), name, max_length)
    report = DataReport(
        source=name,
        fingerprint=documents_fingerprint(kept),
        num_documents=len(kept),
        num_tokens=sum(kept["length"]),
        num_loss_tokens=sum(kept["loss_tokens"]),
        num_given_tokens=sum(documents["given"]),
        notes=dict(notes),
    )
    return _split(kept, max_length, options, report)


def _code_fingerprint() -> str:
    """sha256 of this code. `datasets` caches `map` by its arguments, so one of them must change with the code."""
    return content_fingerprint(
        [inspect.getsource(module) for module in (encoding, records_module, sys.modules[__name__])]
    )


def _encode_batch(
    batch: dict[str, list[Any]],
    indices: list[int],
    code: str,
    encoder: Encoder,
    options: DataOptions,
    max_length: int,
    vocab_size: int | None,
) -> dict[str, list[Any]]:
    rows: list[dict[str, Any]] = []
    for place, index in enumerate(indices):
        record = {name: values[place] for name, values in batch.items()}
        try:
            example = read_record(record, options.chat)
            documents = encoder(example)
        except RecordError as error:
            rows.append(_row(Encoded([], []), 0.0, f"{_DROPPED}{error}", index))
            continue
        long = options.long if options.long != "auto" else "split" if isinstance(example, Plain) else "truncate"
        empty = _ENDLESS if record.get("finish") == "endless" else _NO_LOSS_TOKENS
        for document in documents or [Encoded([], [])]:
            _check_ids(document, vocab_size, index)
            bucket = _bucket(documents[0].input_ids, options.seed) if documents else 0.0
            pieces = [_row(piece, bucket, note, index) for piece, note in _pieces(document, max_length, long, empty)]
            pieces[0]["given"] = len(document.input_ids)
            rows += pieces
    return {name: [row[name] for row in rows] for name in _FEATURES}


def _pieces(document: Encoded, max_length: int, long: str, empty: str) -> list[tuple[Encoded, str]]:
    """The pieces of a document that are used, each with a note on what happened to it.

    Args:
        empty: the reason to drop a piece without a token that the target is to emit.
    """
    ids, mask = document.input_ids, document.loss_mask
    if len(ids) > max_length and long == "drop":
        return [(document, f"{_DROPPED}longer than max_length")]
    starts = range(0, max(len(ids), 1), max_length) if long == "split" else [0]
    pieces = [Encoded(ids[s : s + max_length], mask[s : s + max_length]) for s in starts]
    note = _TRUNCATED if len(ids) > max_length and long == "truncate" else ""
    # The first token of a document is given, never emitted.
    return [(piece, note if any(piece.loss_mask[1:]) else f"{_DROPPED}{empty}") for piece in pieces]


def _row(document: Encoded, bucket: float, note: str, record: int) -> dict[str, Any]:
    return {
        "input_ids": document.input_ids,
        "loss_mask": document.loss_mask,
        "length": len(document.input_ids),
        "loss_tokens": sum(document.loss_mask),
        "bucket": bucket,
        "note": note,
        "record": record,
        "given": 0,
    }


def _check_ids(document: Encoded, vocab_size: int | None, index: int) -> None:
    if vocab_size is not None and document.input_ids:
        worst = max(document.input_ids, key=lambda token: abs(token - vocab_size / 2))
        if not 0 <= worst < vocab_size:
            raise SpeculateError(
                f"record {index} holds token {worst}, but the target's vocabulary has {vocab_size} entries: the data "
                "were tokenised, or the tokenizer made, for another model."
            )


def _bucket(input_ids: Sequence[int], seed: int) -> float:
    """A number from 0 to 1 for the content, always the same."""
    content = np.asarray(input_ids, dtype=np.int64).tobytes()
    return int(hashlib.sha256(f"{seed} ".encode() + content).hexdigest()[:13], 16) / 16**13


def _report_notes(notes: Counter[str], num_documents: int, num_kept: int, name: str, max_length: int) -> None:
    if not num_kept:
        raise SpeculateError(
            f"of the {num_documents} documents in the data {name!r} none can be used: {_listed(notes)}."
            + (
                " Conversations need turns of the role 'assistant' that begin within max_length tokens."
                if any(_NO_LOSS_TOKENS in note for note in notes)
                else ""
            )
            + (
                " Write answers that end: `hf-speculate regenerate --temperature 0.7`."
                if any(_ENDLESS in note for note in notes)
                else ""
            )
        )
    if notes:
        logger.warning(
            f"{num_kept} of {num_documents} documents in the data {name!r} are used (max_length {max_length}): "
            f"{_listed(notes)}."
        )


def _listed(notes: Counter[str]) -> str:
    shown = [f"{count} {note.replace(_DROPPED, 'dropped, ')}" for note, count in notes.most_common(5)]
    return "; ".join(shown) + (f"; and {len(notes) - 5} other reasons" if len(notes) > 5 else "")


def _split(documents: Dataset, max_length: int, options: DataOptions, report: DataReport) -> PreparedData:
    if not options.eval_fraction:
        return PreparedData(documents, None, max_length, report, options)
    train, held_out = _sides(documents, documents["bucket"][:], options.eval_fraction)
    if not (len(train) and len(held_out)) and len(set(documents["record"])) < len(documents):
        # Pieces of one document are then on both sides.
        buckets = [_bucket(piece, options.seed) for piece in documents["input_ids"]]
        train, held_out = _sides(documents, buckets, options.eval_fraction)
    if not len(train) or not len(held_out):
        raise SpeculateError(
            f"eval_fraction={options.eval_fraction} of {len(documents)} documents leaves {len(train)} for training "
            f"and {len(held_out)} for evaluation: give more data or another fraction (or seed), or 0, which holds out "
            "none."
        )
    report = replace(report, num_eval_documents=len(held_out))
    return PreparedData(train, held_out, max_length, report, options)


def _sides(documents: Dataset, buckets: Sequence[float], fraction: float) -> tuple[Dataset, Dataset]:
    """The training documents, and those that are held out."""
    is_held_out = np.asarray(buckets) < fraction
    return documents.select(np.flatnonzero(~is_held_out)), documents.select(np.flatnonzero(is_held_out))
