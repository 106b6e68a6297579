"""Cache layers whose entries can be appended, moved and dropped at a cost independent of their number.

They are `DynamicLayer`s in an ordinary transformers `Cache`. Plain `generate`, continuation, beams and stock assisted
decoding work on them unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..compatibility.stock import CROPS_TO_ZERO


if TYPE_CHECKING:
    from typing_extensions import Self


MIN_CAPACITY = 128
GROWTH = 1.5


class PreallocatedLayer(DynamicLayer):
    """A `DynamicLayer` in a buffer that grows geometrically, so that an append writes only the new entries.

    `keys` and `values` are views `[B, heads, length, head_dim]` of the buffers. Assigning to them (beams, batch
    selection, reset) makes the assigned tensor the new buffer. A caller may set `allocate` to make the buffers itself.
    It gets the buffer's name, a tensor of its dtype and device, and the number of entries. Copies and pickles hold the
    entries without the spare room.

    Attributes:
        reserved: number of entries that new buffers have room for, at least.
    """

    first = 0  # index in the text of the oldest entry kept
    reserved = 0

    def __init__(self, *args, **kwargs):
        self.allocate: Callable[[str, Tensor, int], Tensor] | None = None
        self._buffers: dict[str, Tensor] = {}
        self._is_owned = False
        self.length = 0
        super().__init__(*args, **kwargs)
        self.device: torch.device
        self.dtype: torch.dtype

    @classmethod
    def from_layer(cls, layer: DynamicLayer) -> PreallocatedLayer:
        """Takes over the states of a stock layer. They are copied at the next append, never written."""
        new = cls()
        if layer.is_initialized and layer.keys is not None:
            new.dtype, new.device = layer.keys.dtype, layer.keys.device
            new.is_initialized = True
            if layer.keys.numel() > 0:
                new.keys, new.values = layer.keys, layer.values
        return new

    @property
    def keys(self) -> Tensor | None:
        return self._view("keys")

    @keys.setter
    def keys(self, states: Tensor | None) -> None:
        self._adopt("keys", states)

    @property
    def values(self) -> Tensor | None:
        return self._view("values")

    @values.setter
    def values(self, states: Tensor | None) -> None:
        self._adopt("values", states)

    def __getstate__(self) -> dict[str, Any]:
        # a view would be written with its whole buffer
        entries = {name: self._kept(name).clone() for name in self._buffers}
        return vars(self) | {"_buffers": entries, "_is_owned": True, "allocate": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)  # the state is a copy already: another would need twice the memory

    def _kept(self, name: str) -> Tensor:
        """The part of a buffer that the next, larger one would take over."""
        return self._buffers[name][:, :, : self.length]

    def _view(self, name: str) -> Tensor | None:
        buffer = self._buffers.get(name)
        return None if buffer is None else buffer[:, :, : self.length]

    def _adopt(self, name: str, states: Tensor | None) -> None:
        self._is_owned = False
        if states is None:
            self._buffers.pop(name, None)
            self.length = 0
        else:
            self._buffers[name] = states
            self.length = states.shape[-2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._buffers = {"keys": key_states[:, :, :0], "values": value_states[:, :, :0]}
        self._is_owned = False
        self.length = 0
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Appends states `[B, heads, n, head_dim]` and returns views of all entries so far.

        This costs the n new entries, and a copy of the whole buffer when it grows.
        """
        if not self.is_initialized or "keys" not in self._buffers:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[-2]
        if key_states.requires_grad and torch.is_grad_enabled():
            # Autograd needs the old states intact. Compute both before assigning: keys and values share one length.
            old_keys, old_values = (self._buffers[name][:, :, :start] for name in ("keys", "values"))
            keys, values = torch.cat([old_keys, key_states], -2), torch.cat([old_values, value_states], -2)
            self.keys, self.values = keys, values
            return keys, values
        self.reserve(end, key_states, value_states)
        keys, values = self._buffers["keys"], self._buffers["values"]
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.length = end
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def reserve(self, capacity: int, key_like: Tensor, value_like: Tensor) -> None:
        """Makes room for `capacity` entries a row. It raises nothing and changes no entry."""
        if self._is_owned and self._buffers["keys"].shape[-2] >= capacity and self._is_writable():
            return
        for name, like in (("keys", key_like), ("values", value_like)):
            # An adopted buffer may have another batch layout; the new states show the number and size of the heads.
            grown = (self.allocate or self._allocate)(name, like, max(capacity, self.reserved))
            if self.length:
                grown[:, :, : self.length] = self._buffers[name][:, :, : self.length]
            self._buffers[name] = grown
        self._is_owned = True

    @property
    def origin(self) -> int:
        """Index in the text of the first entry in the buffers."""
        return 0

    def clear_after(self, ends: Sequence[int]) -> None:
        """Sets everything after the first `ends[row]` entries of each row to 0, up to the end of the buffers."""
        for name, buffer in self._buffers.items():
            starts = [max(end - self.origin, 0) for end in ends]
            if min(starts) >= buffer.shape[2]:
                continue
            if not (self._is_owned and self._is_writable()):
                self._buffers[name] = buffer = buffer.clone()
            for row, start in zip(buffer, starts, strict=True):
                row[:, start:] = 0

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Buffers of keys and values with their spare room; empty before the first append."""
        return tuple(self._buffers.values())

    def exchange(self, buffers: Sequence[Tensor]) -> None:
        """Replaces the buffers in one assignment: same entries, perhaps other rows."""
        self._buffers = dict(zip(self._buffers, buffers, strict=True))

    def reserve_more(self, num_entries: int, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """The buffers `[B, heads, capacity, head_dim]` of keys and values, with room for `num_entries` more entries.

        The caller writes the entries and updates `length`. Entry i of the text is at `i - origin`.

        Args:
            shape: B, heads and head_dim, for a layer that is still empty. Its `dtype` and `device` must be set.
        """
        capacity = self.length + num_entries
        if not self._is_owned or self._buffers["keys"].shape[-2] < capacity - self.origin or not self._is_writable():
            batch_size, heads, head_dim = shape
            like = torch.empty(batch_size, heads, 0, head_dim, dtype=self.dtype, device=self.device)
            self.reserve(capacity, like, like)
        return self._buffers["keys"], self._buffers["values"]

    def _allocate(self, _name: str, like: Tensor, num_entries: int) -> Tensor:
        capacity = max(num_entries, int(GROWTH * self.length), MIN_CAPACITY)
        return like.new_empty(like.shape[0], like.shape[1], capacity, like.shape[3])

    def _is_writable(self) -> bool:
        """Whether the buffers may be written: inference tensors must not be written outside inference mode."""
        return torch.is_inference_mode_enabled() or not self._buffers["keys"].is_inference()

    def get_seq_length(self) -> int:
        return self.length if self.is_initialized else 0

    def reset(self) -> None:
        """Drops all entries, as newer versions of transformers do. Older ones overwrite them with zeros."""
        self.keys = self.values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` entries, by stock's contract."""
        if tokens_to_remove > 0 or (tokens_to_remove == 0 and CROPS_TO_ZERO):
            return super().crop(tokens_to_remove)
        self.length = max(self.length + tokens_to_remove, 0)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copies entries within the buffers, at a cost independent of the length.

        Args:
            sources, destinations: absolute entry indices, int64 [k] (the same for all rows) or [B, k].
        """
        for buffer in self._buffers.values():
            sources, destinations = sources.to(buffer.device), destinations.to(buffer.device)
            if sources.dim() == 1:
                buffer.index_copy_(2, destinations, buffer.index_select(2, sources))
            else:
                rows = torch.arange(buffer.shape[0], device=buffer.device, dtype=torch.long)[:, None]
                buffer[rows, :, destinations] = buffer[rows, :, sources]
