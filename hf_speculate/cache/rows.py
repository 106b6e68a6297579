"""Rows of a batch that have ended leave the cache, so that no forward runs them; in the end they come back.

Layer by layer, what the leaving rows hold is copied aside, and the others are copied to smaller buffers: at no time is
there a second copy of the cache, but of one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ..transfers import to_device
from .layers import PreallocatedLayer
from .sliding import SlidingLayer


# Entries that a layer can still be given after rows have left, before its buffers have to grow.
_ROOM = 64


class _Left(NamedTuple):
    """Rows that left a layer together: what it held of them from entry `first` on, [R, heads, n, head_dim] each."""

    rows: Sequence[int]
    first: int
    states: Mapping[str, Tensor]


class RowsAside:
    """The entries of rows that were taken out of the layers of one cache.

    An interruption may fall between any two layers, or into one. So what leaves a layer is noted before the layer is
    changed, a layer is changed by one assignment, and which rows a layer holds is seen by how many these are.

    Args:
        batch_size: B.
    """

    def __init__(self, batch_size: int):
        self._selections: list[Sequence[int]] = [range(batch_size)]
        self._left: dict[PreallocatedLayer, list[_Left]] = {}

    def select(self, layers: Iterable[PreallocatedLayer], rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Makes every layer hold `rows`, some of those that it holds, and no others.

        Args:
            lengths: committed entries of every row of the batch.
        """
        self._selections.append(rows)
        for layer in layers:
            if layer._buffers:
                self._select(layer, rows, lengths)

    def _select(self, layer: PreallocatedLayer, rows: Sequence[int], lengths: Sequence[int]) -> None:
        held = self._held(layer)
        leaving = [row for row in held if row not in rows]
        stay, go = ([held.index(row) for row in part] for part in (rows, leaving))
        first, origin = _first(layer), layer.origin
        left = slice(first - origin, max(first, *(lengths[row] for row in leaving)) - origin)
        kept = slice(max(lengths[row] for row in rows) + _ROOM - origin)
        states = {name: _take(buffer[:, :, left], go) for name, buffer in layer._buffers.items()}
        self._left.setdefault(layer, []).append(_Left(leaving, first, states))
        layer._buffers = {name: _take(buffer[:, :, kept], stay) for name, buffer in layer._buffers.items()}

    def bring_back(self, layers: Iterable[PreallocatedLayer], lengths: Sequence[int]) -> None:
        """Makes every layer hold all rows again, up to the end of the longest."""
        for layer in layers:
            if layer._buffers and len(self._held(layer)) < len(lengths):
                layer._buffers = {name: self._whole(layer, name, lengths) for name in layer._buffers}

    def _whole(self, layer: PreallocatedLayer, name: str, lengths: Sequence[int]) -> Tensor:
        """The buffer of all rows. What no row has written is 0: in attention it gets the weight 0, and 0 x NaN is
        not 0."""
        held, buffer, origin = self._held(layer), layer._buffers[name], layer.origin
        shape = (len(lengths), buffer.shape[1], max(lengths) - origin, buffer.shape[3])
        whole = buffer.new_zeros(shape)
        for rows, first, states in self._left.get(layer, ()):
            begin = max(first, _first(layer))  # windows have moved on since
            _put(whole, rows, states[name][:, :, begin - first :], begin - origin)
        end = max(lengths[row] for row in held) - origin
        _put(whole, held, buffer[:, :, :end], 0)
        return whole

    def _held(self, layer: PreallocatedLayer) -> Sequence[int]:
        """The rows in a layer's buffers, by slot."""
        (count,) = {buffer.shape[0] for buffer in layer._buffers.values()}
        return next(rows for rows in self._selections if len(rows) == count)


def _take(buffer: Tensor, slots: Sequence[int]) -> Tensor:
    return buffer.index_select(0, to_device(slots, buffer.device))


def _put(whole: Tensor, rows: Sequence[int], states: Tensor, start: int) -> None:
    """Writes entries [R, heads, n, head_dim] of some rows from index `start` on."""
    part = whole[:, :, start : start + states.shape[2]]
    part.index_copy_(0, to_device(rows, whole.device), states)


def _first(layer: PreallocatedLayer) -> int:
    """Index of the oldest entry that a layer keeps."""
    return layer.first if isinstance(layer, SlidingLayer) else 0
