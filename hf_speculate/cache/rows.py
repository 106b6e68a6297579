"""Rows of a batch that have ended leave the cache, so that no forward runs them; at the end they come back.

The leaving rows are copied aside and the others to smaller buffers, one layer at a time. So there is never a second
copy of the whole cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..transfers import to_device
from .layers import PreallocatedLayer


# Entries that fit into a layer's smaller buffers before these must grow.
_ROOM = 64


class _Left(NamedTuple):
    """Rows that left a layer together, with their keys and values [R, heads, n, head_dim] from entry `first` on."""

    rows: Sequence[int]
    first: int
    states: tuple[Tensor, ...]


class RowsAside:
    """The entries of rows that were taken out of the layers of one cache.

    An interruption may come at any point. So the rows that leave a layer are noted before the layer changes, and one
    assignment changes it. The number of rows in a layer shows which rows it holds.

    Args:
        batch_size: number of rows of the whole batch, B.
    """

    def __init__(self, batch_size: int):
        self._selections: list[Sequence[int]] = [range(batch_size)]
        self._left: dict[PreallocatedLayer, list[_Left]] = {}

    def select(self, layers: Iterable[PreallocatedLayer], rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Reduces every layer to `rows`, a part of the rows that it holds.

        Args:
            lengths: number of committed entries of every row of the batch.
        """
        self._selections.append(rows)
        for layer in layers:
            if layer.buffers:
                self._select(layer, rows, lengths)

    def _select(self, layer: PreallocatedLayer, rows: Sequence[int], lengths: Sequence[int]) -> None:
        held = self._held(layer)
        leaving = [row for row in held if row not in rows]
        stay, go = ([held.index(row) for row in part] for part in (rows, leaving))
        first, origin = layer.first, layer.origin
        left = slice(first - origin, max(first, *(lengths[row] for row in leaving)) - origin)
        kept = slice(max(lengths[row] for row in rows) + _ROOM - origin)
        states = tuple(_take(buffer[:, :, left], go) for buffer in layer.buffers)
        self._left.setdefault(layer, []).append(_Left(leaving, first, states))
        layer.exchange([_take(buffer[:, :, kept], stay) for buffer in layer.buffers])

    def bring_back(self, layers: Iterable[PreallocatedLayer], lengths: Sequence[int]) -> None:
        """Puts all rows back into every layer, up to the end of the longest row."""
        for layer in layers:
            if layer.buffers and len(self._held(layer)) < len(lengths):
                layer.exchange([self._whole(layer, index, lengths) for index in range(len(layer.buffers))])

    def _whole(self, layer: PreallocatedLayer, index: int, lengths: Sequence[int]) -> Tensor:
        """The buffer of all rows (index 0: keys, 1: values).

        Entries that no row has written are 0. Attention gives them the weight 0, but 0 x NaN would be NaN.
        """
        held, buffer, origin = self._held(layer), layer.buffers[index], layer.origin
        shape = (len(lengths), buffer.shape[1], max(lengths) - origin, buffer.shape[3])
        whole = buffer.new_zeros(shape)
        for rows, first, states in self._left.get(layer, ()):
            begin = max(first, layer.first)  # the window has moved on since the rows left
            _put(whole, rows, states[index][:, :, begin - first :], begin - origin)
        end = max(lengths[row] for row in held) - origin
        _put(whole, held, buffer[:, :, :end], 0)
        return whole

    def _held(self, layer: PreallocatedLayer) -> Sequence[int]:
        """The rows in a layer's buffers, in their order there."""
        (count,) = {buffer.shape[0] for buffer in layer.buffers}
        return next(rows for rows in self._selections if len(rows) == count)


def _take(buffer: Tensor, slots: Sequence[int]) -> Tensor:
    return buffer.index_select(0, to_device(slots, buffer.device))


def _put(whole: Tensor, rows: Sequence[int], states: Tensor, start: int) -> None:
    """Writes entries [R, heads, n, head_dim] of some rows, from index `start` on."""
    part = whole[:, :, start : start + states.shape[2]]
    part.index_copy_(0, to_device(rows, whole.device), states)
