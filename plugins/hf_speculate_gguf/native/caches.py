"""transformers' caches in the form that the kernel writes in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_speculate.cache import PreallocatedLayer, SlidingLayer

from . import binding
from .layers import CallStructure, Entries, NativeLayers
from .memory import check_range
from .refusals import Refused


def appendable_layers(cache: Cache, windows: Sequence[int | None]) -> list[PreallocatedLayer]:
    """Layers of a cache whose entries can be written in place. Stock layers among them are replaced by such layers.

    With a window (`LayerParts`), a cache layer may keep just that, or all entries.

    Raises:
        Refused: a layer is of another kind, or lengths differ.
    """
    count = len(windows)
    if type(cache).update is not Cache.update:
        raise Refused(f"a cache of type {type(cache).__name__}, which stores entries in its own way")
    if cache.offloading:
        raise Refused("a cache that offloads its layers")
    layers = cache.layers
    while len(layers) < count and cache.layer_class_to_replicate in (DynamicLayer, PreallocatedLayer):
        layers.append(PreallocatedLayer())
    present = layers[:count]
    if len(present) < count or not all(map(_keeps, present, windows)):
        kinds = sorted({type(layer).__name__ for layer in present})
        raise Refused(f"a cache with layers of type {', '.join(kinds) or 'unknown'}")
    appendable: list[PreallocatedLayer] = []
    for index in range(count):
        layer: Any = layers[index]
        if ours := _OURS.get(type(layer)):
            layer = layers[index] = ours.from_layer(layer)
        appendable.append(layer)
    length = appendable[0].get_seq_length()
    if not all(layer.get_seq_length() == length for layer in appendable):
        raise Refused("a cache whose layers differ in length")
    return appendable


_OURS: dict[type, type[PreallocatedLayer]] = {
    DynamicLayer: PreallocatedLayer,
    DynamicSlidingWindowLayer: SlidingLayer,
}


def _keeps(layer: Any, window: int | None) -> bool:
    """Whether a cache layer keeps the entries of a layer with this window."""
    if type(layer) in (DynamicLayer, PreallocatedLayer):
        return True
    return type(layer) in (DynamicSlidingWindowLayer, SlidingLayer) and layer.sliding_window == window


def reserve(
    layers: Sequence[PreallocatedLayer], count: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> list[Entries]:
    """The entries of each layer, with memory for `count` more. No entry is changed.

    Args:
        shape: batch size, heads and head_dim of the layers.

    Raises:
        Refused: the kernel cannot read the layout of the entries.
    """
    for layer in layers:
        if not layer.is_initialized or not layer.buffers:
            like = torch.empty(*shape[:2], 0, shape[2], dtype=dtype, device="cpu")
            layer.lazy_initialization(like, like)
        elif not all(_fits(states, shape, dtype) for states in layer.buffers):
            raise Refused(f"a cache whose entries are not {dtype} on the CPU, or of another batch size")
    reserved = [layer.reserve_more(count, shape) for layer in layers]
    for keys, values in reserved:
        strides = keys.stride()
        if strides != values.stride() or strides[2:] != (shape[2], 1):
            raise Refused("a cache with entries that are not contiguous")
    return [Entries(*states, layer.origin) for states, layer in zip(reserved, layers, strict=True)]


def _fits(states: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> bool:
    size = states.shape[0], states.shape[1], states.shape[3]
    return size == shape and states.dtype is dtype and states.is_cpu and not states.requires_grad


@dataclass(frozen=True)
class KVBuffers:
    """Memory for new entries of all layers of one cache, and a call of the native layers with it."""

    native: NativeLayers
    layers: Sequence[PreallocatedLayer]
    entries: Sequence[Entries]
    call: CallStructure

    @classmethod
    def of(cls, native: NativeLayers, cache: Cache, batch_size: int, count: int) -> KVBuffers:
        """Memory for `count` more entries of each text. Raises `Refused` if the kernel cannot write this cache."""
        layers = appendable_layers(cache, native.windows)
        entries = reserve(layers, count, (batch_size, *native.heads), native.dtype)
        return cls(native, layers, entries, native.call(entries))

    def takes(self, native: NativeLayers, cache: Cache, batch_size: int, count: int, are_alike: bool = False) -> bool:
        """Whether these are still the buffers of `cache`, for `count` more entries.

        If all layers of a type have changed in the same way since (`are_alike`), two of them are checked. Checking all
        takes a hundredth of a step.
        """
        if self.native is not native or cache.layers != self.layers or cache.offloading:
            return False
        kept = self._examples if are_alike else range(len(self.layers))
        for layer, (keys, values, _) in ((self.layers[i], self.entries[i]) for i in kept):
            if not layer.buffers or layer.length != self.length or keys.shape[0] != batch_size:
                return False
            reserved = layer.reserve_more(count, (batch_size, *native.heads))
            if reserved[0] is not keys or reserved[1] is not values:
                return False
        return True

    @cached_property
    def _examples(self) -> list[int]:
        """The first and the last layer of each type."""
        windows = self.native.windows
        last = {window: index for index, window in enumerate(windows)}
        return sorted({*last.values(), *map(windows.index, last)})

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Moves entries in all layers (`cache.Mover`)."""
        count, batch_size = len(sources), len(self.entries[0].keys)
        for place in (*sources, *destinations):
            check_range("an entry's place", place, 0, self.call.capacity - 1)
        places = ctypes.c_int64 * count
        binding.library().move(ctypes.addressof(self.call), batch_size, places(*sources), places(*destinations), count)

    @property
    def length(self) -> int:
        """Number of entries of each text."""
        return self.layers[0].length

    def count(self, length: int) -> None:
        """Sets the number of entries of each text."""
        for layer in self.layers:
            layer.length = length
