"""Best-fit packing, rows, the collator."""

from __future__ import annotations

import random

import pytest
import torch
from datasets import Dataset

from hf_speculate.errors import SpeculateError
from hf_speculate_training.data import NO_DOCUMENT, Collator, RowDataset, StreamedRows, best_fit_decreasing


def best_fit_reference(lengths, capacity):
    """Every row looked at for every item."""
    rows = []
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = [row for row in rows if sum(lengths[i] for i in row) + lengths[item] <= capacity]
        if not fitting:
            rows.append([item])
            continue
        fullest = max(sum(lengths[i] for i in row) for row in fitting)
        next(row for row in reversed(fitting) if sum(lengths[i] for i in row) == fullest).append(item)
    return rows


def documents(lengths):
    ids = [[100 * number + i for i in range(length)] for number, length in enumerate(lengths)]
    masks = [[i % 2 == 1 for i in range(length)] for length in lengths]
    return Dataset.from_dict({"input_ids": ids, "loss_mask": masks, "length": list(lengths)})


@pytest.mark.parametrize("seed", range(8))
def test_best_fit_decreasing(seed):
    choose = random.Random(seed)
    capacity = choose.choice([8, 64, 100])
    lengths = [choose.randint(1, capacity) for _ in range(choose.randint(1, 200))]
    rows = best_fit_decreasing(lengths, capacity)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths))), "each item once"
    assert all(sum(lengths[i] for i in row) <= capacity for row in rows)
    fill = [
        sorted(sum(lengths[i] for i in row) for row in packed)
        for packed in (rows, best_fit_reference(lengths, capacity))
    ]
    assert fill[0] == fill[1], "the same rows as the plain search, up to ties"
    assert best_fit_decreasing(lengths, capacity) == rows


def test_best_fit_limits():
    assert best_fit_decreasing([], 8) == []
    assert best_fit_decreasing([8, 8], 8) == [[0], [1]]
    with pytest.raises(SpeculateError, match="9 tokens does not fit into rows of 8"):
        best_fit_decreasing([1, 9], 8)


def test_rows_hold_every_document_once():
    data = documents([5, 3, 8, 2, 6])
    rows = RowDataset(data, max_length=8)
    assert [rows.row_length(i) for i in range(len(rows))] == [len(rows[i]["input_ids"]) for i in range(len(rows))]
    assert rows.fill == pytest.approx(24 / (8 * len(rows)))
    found = []
    for i in range(len(rows)):
        row = rows[i]
        for number in row["document_ids"].unique().tolist():
            part = row["document_ids"] == number
            assert row["position_ids"][part].tolist() == list(range(int(part.sum())))
            found.append((row["input_ids"][part].tolist(), row["loss_mask"][part].tolist()))
    assert sorted(found) == sorted(zip(data["input_ids"], data["loss_mask"], strict=True))


def test_rows_without_packing():
    rows = RowDataset(documents([5, 3]), max_length=8, packing=False)
    assert [len(rows[i]["input_ids"]) for i in range(len(rows))] == [5, 3]


def test_streamed_rows_are_packed_in_windows():
    data = documents([5, 3, 8, 2, 6, 2])
    rows = list(StreamedRows(data, max_length=8, window=3))
    assert [len(row["input_ids"]) for row in rows] == [8, 8, 8, 2], "5 + 3 and 8, then 6 + 2 and 2"
    assert sorted(torch.cat([row["input_ids"] for row in rows]).tolist()) == sorted(
        token for ids in data["input_ids"] for token in ids
    )


@pytest.mark.parametrize("length", [None, 12])
def test_collator_pads_with_a_document_of_its_own(length):
    rows = RowDataset(documents([5, 3, 6]), max_length=8)
    batch = Collator(pad_token_id=9, length=length)([rows[0], rows[1]])
    width = length or 8
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(batch, (2, width))
    padding = batch["document_ids"] == NO_DOCUMENT
    assert padding.sum() == 2 * width - 14
    assert (batch["input_ids"][padding] == 9).all()
    assert not batch["loss_mask"][padding].any()
    for row, is_padding in zip(batch["position_ids"], padding, strict=True):
        assert row[is_padding].tolist() == list(range(int(is_padding.sum())))
    with pytest.raises(SpeculateError, match="6 tokens does not fit into the collator's length 4"):
        Collator(length=4)([rows[0], rows[1]])
