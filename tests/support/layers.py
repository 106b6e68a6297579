"""Cache layers of ours beside stock's."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


HEADS, HEAD_DIM = 2, 4


def states(batch_size: int, length: int, requires_grad: bool = False) -> list[torch.Tensor]:
    """(keys, values), different from each other."""
    shape = (batch_size, HEADS, length, HEAD_DIM)
    return [torch.randn(shape, requires_grad=requires_grad) for _ in range(2)]


def assert_updates_equal(ours: Any, stock: Any, batch_size: int, length: int) -> None:
    """Both are appended to, and return the same."""
    new = states(batch_size, length)
    returned, expected = ours.update(*new), stock.update(*new)
    assert all(torch.equal(a, b) for a, b in zip(returned, expected, strict=True))


def reset_both(ours: Any, stock: Any) -> Any:
    """Drops all entries; returns stock's layer: a new one where its `reset` overwrites entries with zeros."""
    ours.reset()
    if "reset" in vars(DynamicLayer):
        stock.reset()
        return stock
    if isinstance(stock, DynamicSlidingWindowLayer):
        return DynamicSlidingWindowLayer(sliding_window=stock.sliding_window)
    return DynamicLayer()


def change_rows(operation: str, ours: Any, stock: Any, batch_size: int, choose: random.Random) -> int:
    """Does to the rows of both layers what beams and batch selection do; the new batch size."""
    rows = torch.tensor([choose.randrange(batch_size) for _ in range(batch_size)])
    if operation == "reorder":
        ours.reorder_cache(rows), stock.reorder_cache(rows)
    elif operation == "select" and batch_size > 1:
        ours.batch_select_indices(rows[1:]), stock.batch_select_indices(rows[1:])
        return batch_size - 1
    elif operation == "repeat" and batch_size < 5:
        ours.batch_repeat_interleave(2), stock.batch_repeat_interleave(2)
        return batch_size * 2
    return batch_size
