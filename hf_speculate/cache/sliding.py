"""Sliding-window cache layers whose end can move back. Entries that have left the window are dropped only when the
buffer is full."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..compatibility.stock import CROPS_TO_ZERO
from .layers import GROWTH, MIN_CAPACITY, PreallocatedLayer


# Entries kept after they have left the window: the end can always move back by this many.
_SPARE = 64

_Checkpoint = tuple[dict[str, Tensor], dict[str, int], int, int, bool]


class SlidingLayer(PreallocatedLayer, DynamicSlidingWindowLayer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A `DynamicSlidingWindowLayer` with a buffer: an append writes only the new entries.

    Entries are addressed by their index in the text; `first` is the oldest one kept. `keys` and `values` are views of
    what the next token can see, as in stock. The buffer has room for about 1.5 windows.

    Attributes:
        pinned_from: index of the oldest entry that any row still sees, while a `TreeCache` controls the layer. All
            entries from there on are kept and returned. None: the window moves with every append, as in stock.
    """

    record_past = False  # versions of transformers before 5.14 record nothing

    def __init__(self, sliding_window: int, **kwargs):
        self._origins = {"keys": 0, "values": 0}  # index of the first entry of each buffer
        self.first: int = 0
        self.pinned_from: int | None = None
        super().__init__(sliding_window=sliding_window)

    @classmethod
    def from_layer(cls, layer: DynamicLayer) -> SlidingLayer:
        """Takes over the states of a stock layer. They are copied at the next append, never written."""
        assert isinstance(layer, DynamicSlidingWindowLayer)
        new = cls(layer.sliding_window)
        new.record_past = getattr(layer, "record_past", False)
        if layer.is_initialized and layer.keys is not None:
            new.dtype, new.device = layer.keys.dtype, layer.keys.device
            new.is_initialized = True
            if layer.keys.numel() > 0:
                new.length = layer.cumulative_length
                new.first = new.length - layer.keys.shape[-2]
                new.keys, new.values = layer.keys, layer.values
        return new

    @property
    def cumulative_length(self) -> int:
        """The length of the text, by stock's name."""
        return self.length

    @cumulative_length.setter
    def cumulative_length(self, length: int) -> None:
        self.length = length

    @property
    def origin(self) -> int:
        return self._origins["keys"]

    @property
    def visible_from(self) -> int:
        """Index of the first entry that the next forward sees."""
        return self.window_start(self.length) if self.pinned_from is None else self.pinned_from

    @property
    def shortest_length(self) -> int:
        """The shortest length to which the text can be cut: the window of a shorter text is gone."""
        return self.first + self.sliding_window - 1 if self.first else 0

    def window_start(self, length: int) -> int:
        """Index of the oldest entry that the next token sees after a text of `length` entries."""
        return max(length - self.sliding_window + 1, 0)

    def __getstate__(self) -> dict[str, Any]:
        kept_from = self._kept_from
        return super().__getstate__() | {"_origins": dict.fromkeys(self._origins, kept_from), "first": kept_from}

    @property
    def _kept_from(self) -> int:
        """Index of the first entry that the next buffer takes over."""
        return self.first if self.record_past else max(self.visible_from - _SPARE, self.first)

    def _kept(self, name: str) -> Tensor:
        origin = self._origins[name]
        return self._buffers[name][:, :, self._kept_from - origin : self.length - origin]

    def _view(self, name: str) -> Tensor | None:
        buffer, origin = self._buffers.get(name), self._origins[name]
        return None if buffer is None else buffer[:, :, self.visible_from - origin : self.length - origin]

    def _adopt(self, name: str, states: Tensor | None) -> None:
        self._is_owned = False
        if states is None:
            self._buffers.pop(name, None)
            self.length = self.first = self._origins[name] = 0
        else:
            self._buffers[name] = states
            self._origins[name] = self.first = self.length - states.shape[-2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._origins = {"keys": 0, "values": 0}
        self.first = 0
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Appends states `[B, heads, n, head_dim]` and returns views from the first visible entry on.

        This costs the n new entries, and a copy of the window when the buffer is full.
        """
        if not self.is_initialized or self.keys is None:
            self.lazy_initialization(key_states, value_states)
        start, end = self.visible_from, self.length + key_states.shape[-2]
        if key_states.requires_grad and torch.is_grad_enabled():
            old: Any = self.keys, self.values
            keys, values = torch.cat([old[0], key_states], -2), torch.cat([old[1], value_states], -2)
            self.length = end
            self.keys, self.values = keys, values
            return keys, values
        self.reserve(end, key_states, value_states)
        for name, states in (("keys", key_states), ("values", value_states)):
            origin = self._origins[name]
            self._buffers[name][:, :, self.length - origin : end - origin] = states
        self.length = end
        keys, values = (
            self._buffers[n][:, :, start - self._origins[n] : end - self._origins[n]] for n in self._origins
        )
        return keys, values

    def reserve(self, capacity: int, key_like: Tensor, value_like: Tensor) -> None:
        """Makes room up to index `capacity`, dropping entries that have left the window. It changes no entry."""
        room = capacity - self.origin
        if self._is_owned and self._buffers["keys"].shape[-2] >= room and self._is_writable():
            return
        kept_from = self._kept_from
        num_kept = self.length - kept_from
        size = max(capacity - kept_from, int(GROWTH * num_kept), MIN_CAPACITY)
        for name, like in (("keys", key_like), ("values", value_like)):
            grown = like.new_empty(like.shape[0], like.shape[1], size, like.shape[3])
            if num_kept:
                grown[:, :, :num_kept] = self._kept(name)
            self._buffers[name], self._origins[name] = grown, kept_from
        self.first, self._is_owned = kept_from, True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of entries that `update` will return, and the index of the first, by stock's contract."""
        return self.length + query_length - self.visible_from, self.visible_from

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` entries. Unlike stock, this needs no past recording while they are
        kept."""
        if tokens_to_remove > 0 or (tokens_to_remove == 0 and CROPS_TO_ZERO):
            return DynamicSlidingWindowLayer.crop(self, tokens_to_remove)
        length = max(self.length + tokens_to_remove, 0)
        if length < self.shortest_length:
            raise RuntimeError(
                f"cannot crop a sliding window of {self.sliding_window} from {self.length} to {length} entries: only "
                f"those from {self.first} on are kept. Call `activate_past_recording` before."
            )
        self.length = length
        if self.record_past:
            self.first = max(self.first, self.window_start(length))

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copies entries as `PreallocatedLayer.move` does. Entries that were dropped stay dropped."""
        origin = self.origin
        super().move((sources - origin).clamp(min=0), (destinations - origin).clamp(min=0))

    def checkpoint(self) -> _Checkpoint:
        """The present state, without a copy: entries are never overwritten."""
        return dict(self._buffers), dict(self._origins), self.first, self.length, self._is_owned

    def revert(self, checkpoint: _Checkpoint) -> None:
        buffers, origins, self.first, self.length, self._is_owned = checkpoint
        self._buffers, self._origins = dict(buffers), dict(origins)
