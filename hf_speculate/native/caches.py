"""transformers' caches as the native kernel writes them: in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..cache import PreallocatedLayer
from . import binding
from .layers import CallStructure, NativeLayers


def appendable_layers(cache: Cache, first: int, count: int) -> list[PreallocatedLayer]:
    """Layers of a cache in which entries can be written in place; those of transformers' own become such layers.

    Empty where they are of another kind, or of different lengths.
    """
    if type(cache).update is not Cache.update or cache.offloading:
        return []
    layers = cache.layers
    while len(layers) < first + count and cache.layer_class_to_replicate in (DynamicLayer, PreallocatedLayer):
        layers.append(PreallocatedLayer())
    kinds = [type(layer) for layer in layers[first : first + count]]
    if len(kinds) < count or not set(kinds) <= {PreallocatedLayer, DynamicLayer}:
        return []
    found: list[PreallocatedLayer] = []
    for index in range(first, first + count):
        layer: Any = layers[index]
        if type(layer) is DynamicLayer:
            layer = layers[index] = PreallocatedLayer.from_layer(layer)
        found.append(layer)
    length = found[0].get_seq_length()
    return found if all(layer.get_seq_length() == length for layer in found) else []


def make_room(
    layers: Sequence[PreallocatedLayer], inputs: Tensor, shape: tuple[int, int, int]
) -> list[tuple[Tensor, Tensor]] | None:
    """The buffers of keys and values of each layer, with room for the rows of `inputs` behind the entries there are.

    Args:
        inputs: [B, N, H].
        shape: B, heads and head_dim of the layers.
    Returns:
        None where entries lie otherwise than the kernel reads them; no entry was changed.
    """
    for layer in layers:
        if not layer.is_initialized or not layer.buffers:
            like = inputs.new_empty(*shape[:2], 0, shape[2])
            layer.lazy_initialization(like, like)
        elif not all(_fits(states, shape, inputs.dtype) for states in layer.buffers):
            return None
    found = [layer.make_room(inputs.shape[1], shape) for layer in layers]
    for keys, values in found:
        strides = keys.stride()
        if strides != values.stride() or strides[2:] != (shape[2], 1):
            return None
    return found


def _fits(states: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> bool:
    found = states.shape[0], states.shape[1], states.shape[3]
    return found == shape and states.dtype is dtype and states.is_cpu and not states.requires_grad


@dataclass(frozen=True)
class Room:
    """The places of new entries of all layers in one cache.

    Attributes:
        native: whose entries.
        layers: of the cache.
        buffers: theirs, with room.
        call: of `native`, with these buffers.
    """

    native: NativeLayers
    layers: Sequence[PreallocatedLayer]
    buffers: Sequence[tuple[Tensor, Tensor]]
    call: CallStructure

    @classmethod
    def of(cls, native: NativeLayers, cache: Cache, batch_size: int, count: int) -> Room | None:
        """Room for some more entries of each text; None where the cache is one that the kernel does not write."""
        layers = appendable_layers(cache, 0, len(native))
        like = torch.empty(batch_size, count, 0, dtype=native.dtype)
        buffers = make_room(layers, like, (batch_size, *native.heads)) if layers else None
        return None if buffers is None else cls(native, layers, buffers, native.call(buffers))

    def takes(self, native: NativeLayers, cache: Cache, batch_size: int, count: int, are_alike: bool = False) -> bool:
        """Whether this is still the room of this cache, for so many more entries.

        Args:
            are_alike: whatever became of one layer since became of all.
        """
        if self.native is not native or cache.layers != self.layers or cache.offloading:
            return False
        kept = (0, -1) if are_alike else range(len(self.layers))
        for layer, (keys, values) in ((self.layers[i], self.buffers[i]) for i in kept):
            if not layer.buffers or layer.length != self.length or keys.shape[0] != batch_size:
                return False
            found = layer.make_room(count, (batch_size, *native.heads))
            if found[0] is not keys or found[1] is not values:
                return False
        return True

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Moves entries of all layers, see `cache.Mover`."""
        count, batch_size = len(sources), len(self.buffers[0][0])
        places = ctypes.c_int64 * count
        binding.library().move(ctypes.addressof(self.call), batch_size, places(*sources), places(*destinations), count)

    @property
    def length(self) -> int:
        """Entries of each text."""
        return self.layers[0].length

    def count(self, length: int) -> None:
        """So many are there now."""
        for layer in self.layers:
            layer.length = length
