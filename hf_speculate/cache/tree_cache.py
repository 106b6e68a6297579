"""The KV cache of one request: append, keep and truncate.

A forward appends N entries a row from a common index on. `keep` moves the accepted ones to each row's own end. One
assignment of `lengths` commits; until then the old state is intact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
)

from ..compatibility.stock import PLACEHOLDER_LAYERS
from ..errors import CacheStateError
from ..transfers import to_device
from .layers import MIN_CAPACITY, PreallocatedLayer
from .rows import RowsAside
from .sliding import SlidingLayer


Mover = Callable[[Cache, Sequence[int], Sequence[int]], bool]
"""A function that moves the same entries in all layers and rows, in ascending order and only to the left.

It takes (cache, sources, destinations) and returns whether it could.
"""

# Entries by index: the same ones in all rows, or those of each row.
_Entries = Sequence[int] | Sequence[Sequence[int]]

_OURS: dict[type, type[PreallocatedLayer]] = {
    DynamicLayer: PreallocatedLayer,
    DynamicSlidingWindowLayer: SlidingLayer,
}
INDEXABLE = (*_OURS, *_OURS.values(), *PLACEHOLDER_LAYERS)


def is_indexable(cache: Cache) -> bool:
    """Whether the entries of every layer of `cache` can be addressed by index (attention, with or without a window)."""
    replicated = cache.layer_class_to_replicate
    if replicated is not None and replicated not in (DynamicLayer, PreallocatedLayer):
        return False
    return not cache.offloading and all(type(layer) in INDEXABLE for layer in cache.layers)


def reserving(static: StaticCache, config: PretrainedConfig) -> DynamicCache:
    """An empty cache whose buffers have room for all that `static` can hold, and for a draft, from the first append.

    Sliding windows hold little, and grow as they do without.

    Args:
        static: cache that holds nothing yet.
        config: configuration of the text model.
    """
    num_entries = max(getattr(layer, "max_cache_len", 0) for layer in static.layers)
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = ours = PreallocatedLayer.from_layer(layer)
            ours.reserved = num_entries + MIN_CAPACITY
    return cache


class TreeCache:
    """Controls the layers of one `Cache` during speculation.

    The layers are replaced in place, so the user's own cache object stays in use. All rows append at the common index
    `max(lengths)` but have their own lengths. Entries of row r in `[lengths[r], max(lengths))` are holes that a mask
    must hide. Finished rows can be set aside. The layers then hold only `rows`, and forwards run only these.

    Args:
        cache: cache whose layers all hold attention states (`is_indexable`).
        batch_size: number of rows, B.

    Attributes:
        mover: function that moves entries in all layers at once; None moves them layer by layer.
        has_moved: whether the last forward has already moved the entries of the paths that `keep` will get. It may have
            moved those of longer paths that begin with them.

    Raises:
        CacheStateError: a layer cannot be indexed.
    """

    mover: Mover | None = None
    has_moved: bool = False

    def __init__(self, cache: Cache, batch_size: int):
        if not self.accepts(cache):
            kinds = sorted({type(layer).__name__ for layer in cache.layers})
            raise CacheStateError(
                f"cannot keep entries by index in a {type(cache).__name__} with layers {kinds}; "
                "every layer must be a DynamicLayer or DynamicSlidingWindowLayer without offloading."
            )
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, DynamicLayer) and type(layer) in _OURS:
                cache.layers[index] = _OURS[type(layer)].from_layer(layer)
        if cache.layer_class_to_replicate is not None:
            cache.layer_class_to_replicate = PreallocatedLayer
        self.cache = cache
        self.lengths: tuple[int, ...] = (cache.get_seq_length(),) * batch_size
        self.rows: Sequence[int] = range(batch_size)
        self._aside: RowsAside | None = None
        self._ended: Collection[int] = ()
        self._sliding = [layer for layer in cache.layers if isinstance(layer, SlidingLayer)]
        self.release()
        # A prompt can push everything out of a window; after an interruption it must come back.
        self._before_prompt = [layer.checkpoint() for layer in self._sliding]

    @staticmethod
    def accepts(cache: Cache) -> bool:
        return is_indexable(cache)

    @property
    def present_lengths(self) -> Sequence[int]:
        """Lengths of the rows that the layers hold."""
        return self.lengths if self._aside is None else [self.lengths[row] for row in self.rows]

    @property
    def append_index(self) -> int:
        """The index where the next forward writes: the length of the longest row in the layers."""
        return max(self.present_lengths)

    @property
    def is_ragged(self) -> bool:
        lengths = self.present_lengths
        return min(lengths) != max(lengths)

    def commit_appended(self) -> None:
        """Accepts everything that forwards have appended (the prefill), in all rows."""
        self.lengths = (self.cache.get_seq_length(),) * len(self.lengths)
        self._before_prompt = []
        self._pin_windows()

    def keep(self, paths: Sequence[Sequence[int]], ended: Collection[int] = ()) -> None:
        """Keeps the entries of one path a row among the nodes of the last forward, and drops the others.

        At most `max(len(path))` entries a row move, to the end of the committed prefix. The prefix is never touched.

        Args:
            paths: accepted nodes of each row: strictly increasing indices into the appended block. An empty path leaves
                the row unchanged; it is required for rows that are set aside.
            ended: rows that will never be appended to again. Sliding windows need not wait for them.

        Moves at most `max(len(path))` entries per row after the committed prefix; the prefix is never touched.
        """
        base = self.append_index
        lengths = tuple(length + len(path) for length, path in zip(self.lengths, paths, strict=True))
        if not self.has_moved:
            self._move(base, [paths[row] for row in self.rows])
        self.lengths, self._ended, self._before_prompt = lengths, ended, []
        self.restore()

    def set_aside(self, rows: Collection[int]) -> None:
        """Takes finished rows out of the layers, until `bring_back`.

        This copies the remaining rows. Extra memory is needed for one layer at a time.
        """
        remaining = [row for row in self.rows if row not in rows]
        self._aside = self._aside or RowsAside(len(self.lengths))
        self._aside.select(self._layers, remaining, self.lengths)
        self.rows = remaining
        self.restore()

    def bring_back(self) -> None:
        """Puts all rows back into the layers and makes these agree with `lengths`.

        It works after any interruption. Entries after the end of a row that was set aside are 0.
        """
        if self._aside is not None:
            self._aside.bring_back(self._layers, self.lengths)
            self.rows, self._aside = range(len(self.lengths)), None
        self.restore()

    @property
    def shortest_length(self) -> int:
        """The shortest length to which rows can be cut: 0, or what sliding windows have kept."""
        return max((layer.shortest_length for layer in self._sliding), default=0)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Cuts row r to its first `lengths[r]` entries.

        Raises:
            CacheStateError: a length is beyond the end of its row, or below `shortest_length`.
        """
        for row, (wanted, length) in enumerate(zip(lengths, self.lengths, strict=True)):
            if not 0 <= wanted <= length:
                raise CacheStateError(f"cannot truncate row {row} to {wanted} entries: it has {length}.")
            if wanted < min(length, self.shortest_length):
                raise CacheStateError(
                    f"cannot truncate row {row} from {length} to {wanted} entries: a sliding window has moved on, "
                    f"{self.shortest_length} is the shortest length left."
                )
        self.lengths = tuple(lengths)
        self.restore()

    def restore(self) -> None:
        """Makes the layers agree with `lengths`, dropping entries of an interrupted forward."""
        self.has_moved = False
        for layer, checkpoint in zip(self._sliding, self._before_prompt, strict=False):
            layer.revert(checkpoint)
        length = self.append_index
        for layer in self._layers:
            layer.length = length
        self._pin_windows()

    def clear_uncommitted(self) -> None:
        """Makes the layers agree with `lengths`, and sets everything after the end of each row to 0.

        Masked entries have the weight 0, which hides finite values only: 0 x NaN is NaN.
        """
        self.restore()
        for layer in self._layers:
            layer.clear_after([min(length, layer.length) for length in self.present_lengths])

    def release(self) -> None:
        """Gives the layers back to plain `generate`: sliding windows move with every append again."""
        for layer in self._sliding:
            layer.pinned_from = None

    def visible_from(self, layer_index: int) -> int:
        """Index of the first entry of a layer that the next forward sees."""
        layers = self.cache.layers
        layer = layers[layer_index] if layer_index < len(layers) else None
        return layer.visible_from if isinstance(layer, SlidingLayer) else 0

    def _pin_windows(self) -> None:
        if self._sliding:
            running = (self.lengths[row] for row in self.rows if row not in self._ended)
            shortest = min(running, default=self.append_index)
            for layer in self._sliding:
                layer.pinned_from = layer.window_start(shortest)

    def _move(self, base: int, paths: Sequence[Sequence[int]]) -> None:
        if not self.is_ragged and all(tuple(path) == tuple(paths[0]) for path in paths):
            self._move_shared(base, paths[0])
            return
        width = max(len(path) for path in paths)
        sources, destinations = [], []
        for length, path in zip(self.present_lengths, paths, strict=True):
            stay = range(length + len(path), length + width)
            sources.append([base + node for node in path] + list(stay))
            destinations.append(list(range(length, length + width)))
        if width and sources != destinations:
            self._move_layers(sources, destinations)

    def _move_shared(self, base: int, path: Sequence[int]) -> None:
        first = next((index for index, node in enumerate(path) if node != index), len(path))
        if first == len(path):
            return
        sources, destinations = [base + node for node in path[first:]], range(base + first, base + len(path))
        if self.mover is None or not self.mover(self.cache, sources, destinations):
            self._move_layers(sources, destinations)

    def _move_layers(self, sources: _Entries, destinations: _Entries) -> None:
        placed: dict[torch.device, tuple[Tensor, Tensor]] = {}
        for layer in self._layers:
            device = layer.device
            if device not in placed:
                placed[device] = (to_device(sources, device), to_device(destinations, device))
            layer.move(*placed[device])

    @property
    def _layers(self) -> Iterator[PreallocatedLayer]:
        """The layers that hold entries."""
        for layer in self.cache.layers:
            if isinstance(layer, PreallocatedLayer) and layer.is_initialized:
                yield layer
