"""Rows of documents, best-fit packed, and the batches that methods are given."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from typing_extensions import TypedDict

from hf_speculate.errors import SpeculateError


# `document_ids` of padding.
NO_DOCUMENT = -1


class _Required(TypedDict):
    input_ids: Int[Tensor, "B S"]
    position_ids: Int[Tensor, "B S"]
    document_ids: Int[Tensor, "B S"]
    loss_mask: Bool[Tensor, "B S"]


class Batch(_Required, total=False):
    """B rows of S tokens.

    Attributes:
        input_ids: int64 [B, S].
        position_ids: int64 [B, S], restart at 0 in each document of a row; padding is a document of its own.
        document_ids: int64 [B, S], 0, 1, … within a row; `NO_DOCUMENT` at padding.
        loss_mask: bool [B, S], True for tokens that the target is to emit (assistant or completion tokens).
        features: the target's hidden states [B, S, H] by layer (`TargetStates.features`); only from a cache.
        last_hidden: the target's last states [B, S, H] (`TargetStates.last_hidden`); only from a cache.
    """

    features: dict[int, Float[Tensor, "B S H"]]
    last_hidden: Float[Tensor, "B S H"]


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the items of each row: the longest first, each into the row with the least space that takes it.

    Items have from 1 to `capacity` tokens. The same lengths give the same rows.
    """
    if lengths and max(lengths) > capacity:
        raise SpeculateError(f"a document of {max(lengths)} tokens does not fit into rows of {capacity}.")
    rows: list[list[int]] = []
    rows_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[item]
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[place]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rows_by_room[room], rooms[place]
        rows[row].append(item)
        if room > length:
            if room - length not in rows_by_room:
                insort(rooms, room - length)
            rows_by_room.setdefault(room - length, []).append(row)
    return rows


Row = dict[str, Tensor]


def make_row(documents: Iterable[Mapping[str, Any]]) -> Row:
    """One row, unpadded: the tensors of a `Batch` without the batch dimension."""
    parts: dict[str, list[Tensor]] = {"input_ids": [], "position_ids": [], "document_ids": [], "loss_mask": []}
    for number, document in enumerate(documents):
        ids = torch.as_tensor(document["input_ids"], dtype=torch.int64, device="cpu")
        parts["input_ids"].append(ids)
        parts["position_ids"].append(torch.arange(len(ids), dtype=torch.long, device="cpu"))
        parts["document_ids"].append(torch.full_like(ids, number))
        parts["loss_mask"].append(torch.as_tensor(document["loss_mask"], dtype=torch.bool, device="cpu"))
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


class RowDataset(TorchDataset):
    """Rows of encoded documents (`PreparedData.train`), for a sampler and `Collator`.

    Args:
        documents: records with `input_ids`, `loss_mask` and `length`.
        max_length: tokens of a row at most.
        packing: True puts several documents into a row, False one.
    """

    def __init__(self, documents: Any, max_length: int, packing: bool = True):
        self.max_length = max_length
        self.documents = documents.select_columns(["input_ids", "loss_mask"]).with_format("numpy")
        self.lengths: list[int] = list(documents["length"])
        one_each = [[i] for i in range(len(self.lengths))]
        self.rows = best_fit_decreasing(self.lengths, max_length) if packing else one_each

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return make_row(self.documents[i] for i in self.rows[index])


class Collator:
    """Pads rows on the right to a common length; the states of rows from a cache are padded with zeros.

    Args:
        pad_token_id: token that fills `input_ids`; any id of the vocabulary will do.
        length: length of every row (static shapes); None for that of the longest row of the batch.
    """

    def __init__(self, pad_token_id: int | None = None, length: int | None = None):
        self.pad_token_id, self.length = pad_token_id or 0, length

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        width = self.length or max(len(row["input_ids"]) for row in rows)
        padded = [self._padded(row, width) for row in rows]
        batch: dict[str, Any] = {name: torch.stack([row[name] for row in padded]) for name in padded[0]}
        if "last_hidden" in rows[0]:
            batch |= _padded_states(rows, width)
        return cast(Batch, batch)

    def _padded(self, row: Mapping[str, Any], width: int) -> Row:
        missing = width - len(row["input_ids"])
        if missing < 0:
            raise SpeculateError(f"a row of {width - missing} tokens does not fit into the collator's length {width}.")
        filling = {
            "input_ids": torch.full((missing,), self.pad_token_id, dtype=torch.long, device="cpu"),
            "position_ids": torch.arange(missing, dtype=torch.long, device="cpu"),
            "document_ids": torch.full((missing,), NO_DOCUMENT, dtype=torch.long, device="cpu"),
            "loss_mask": torch.zeros(missing, dtype=torch.bool, device="cpu"),
        }
        return {name: torch.cat([row[name], filling[name]]) for name in filling}


def _padded_states(rows: Sequence[Mapping[str, Any]], width: int) -> dict[str, Any]:
    """`last_hidden` and `features`, [B, width, H]."""

    def stacked(states: Sequence[Tensor]) -> Tensor:
        result = states[0].new_zeros(len(states), width, states[0].shape[-1])
        for place, state in enumerate(states):
            result[place, : len(state)] = state
        return result

    layers = rows[0]["features"]
    features = {layer: stacked([row["features"][layer] for row in rows]) for layer in layers}
    return {"last_hidden": stacked([row["last_hidden"] for row in rows]), "features": features}
