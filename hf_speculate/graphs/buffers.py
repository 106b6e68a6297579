"""Buffers with fixed addresses for compiled forwards, lent to one request after another.

A graph is compiled for the shape of its buffers, and a CUDA graph holds their addresses. So a request leases a set of
buffers for its batch size and capacity. The set returns to its model's pool when the cache object that showed it is
gone. A cache that the caller gets never uses a pool.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ..cache import PreallocatedLayer
from ..transfers import copy_to_device, to_device


def padded(inputs: Tensor, width: int) -> Tensor:
    """[B, width, ...] from [B, N, ...]. Padding copies the first entry, so what it writes is finite if that is."""
    missing = width - inputs.shape[1]
    return torch.cat([inputs, inputs[:, :1].expand(-1, missing, *inputs.shape[2:])], dim=1) if missing else inputs


def padded_mask(mask: Tensor | None, like: Tensor, num_seen: int, width: int, capacity: int) -> Tensor:
    """The additive mask [B, 1, width, capacity]. Padding sees what the first entry sees.

    Args:
        mask: additive mask [B or 1, 1, N, num_seen]; None if everything is seen.
        like: tensor [B, N, ...] whose device and dtype the result gets.
        num_seen: number of cache entries, the N new ones included.
    """
    batch_size, count = like.shape[:2]
    full = like.new_full((batch_size, 1, width, capacity), torch.finfo(like.dtype).min)
    full[:, :, :count, :num_seen] = 0 if mask is None else mask
    full[:, :, count:] = full[:, :, :1]
    return full


MIN_CAPACITY = 512
# Limits of the idle sets of one model, their number and their memory. Those that were idle longest are freed. Long
# texts on large models take gigabytes each.
MAX_IDLE, MAX_IDLE_BYTES = 4, 2 << 30

SetKey = tuple[int, int]  # batch size, capacity
Stacks = tuple[Tensor, Tensor]
"""Keys and values of all layers, each [L, B, heads, M, head_dim]."""


def capacity_for(length: int) -> int:
    """The smallest capacity for `length` entries: a power of two."""
    return max(MIN_CAPACITY, 1 << (length - 1).bit_length())


class StaticLayer(CacheLayerMixin):
    """One layer's buffers in a captured forward: entries are written to given slots, and the whole buffer is shown.

    Args:
        keys, values: buffers `[B, heads, capacity, head_dim]`, written in place.
        slots: int64 [N], index of each new entry; shared by all layers.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor):
        super().__init__()
        self.keys, self.values = keys, values
        self._buffers, self.slots = (keys, values), slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a static layer is made with its buffers")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._buffers
        keys.index_copy_(2, self.slots, key_states)
        values.index_copy_(2, self.slots, value_states)
        return keys, values

    def get_seq_length(self) -> int:
        return self._buffers[0].shape[2] - self.slots.shape[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._buffers[0].shape[2], 0

    def get_max_length(self) -> int:
        return self._buffers[0].shape[2]

    get_max_cache_shape = get_max_length  # its name before transformers 5.14


def static_cache(stacks: Stacks, slots: Tensor) -> Cache:
    """A cache of static layers over stacked buffers, for one forward."""
    keys, values = stacks
    return Cache(layers=[StaticLayer(keys[layer], values[layer], slots) for layer in range(len(keys))])


class Buffers:
    """Tensors by name, made on first use."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, Tensor] = {}

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors.values())

    def tensor(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor of this name. It is made again, with zeros, if its shape, dtype or device has changed."""
        known = self._tensors.get(name)
        if known is None or known.shape != torch.Size(shape) or known.dtype != dtype or known.device != device:
            with torch.inference_mode(False):  # otherwise later calls outside inference mode could not write it
                known = torch.zeros(*shape, dtype=dtype, device=device)
            torch._dynamo.mark_static_address(known, guard=False)  # another set of buffers must not cause a compilation
            self._tensors[name] = known
        return known

    def filled(self, name: Hashable, values: Tensor) -> Tensor:
        """The tensor of this name, filled with a copy of `values`."""
        return self.tensor(name, values.shape, values.dtype, values.device).copy_(values)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self)

    def clear(self) -> None:
        """Sets everything to 0: unseen entries have the weight 0, but 0 x NaN would be NaN."""
        with torch.inference_mode(False):
            for tensor in self:
                tensor.zero_()


class PromptMasks:
    """The mask of one prompt in the sets of buffers that its request uses, written once into each."""

    def __init__(self) -> None:
        self._written: WeakSet[Buffers] = WeakSet()

    def __contains__(self, buffers: Buffers) -> bool:
        return buffers in self._written

    def place_starts(self, buffers: Buffers, starts: Sequence[int], device: torch.device) -> Tensor:
        """The number of padding entries before each row, int64 [B]. Call it before `place`, which ends the writing."""
        placed = buffers.tensor("starts", (len(starts),), torch.long, device)
        if buffers not in self:
            copy_to_device(list(starts), placed)
        return placed

    def place(self, buffers: Buffers, shape: SetKey, device: torch.device, mask: Tensor | None) -> Tensor:
        """Whether entries are real [B, M], apart from where rows end.

        Args:
            shape: (B, M).
            mask: bool [B, P], False for padding and holes of the prompt; None if it has none.
        """
        prompt = buffers.tensor("prompt", shape, torch.bool, device)
        if buffers not in self:
            self._written.add(buffers)
            prompt.fill_(True)
            if mask is not None:
                prompt[:, : mask.shape[1]] = to_device(mask, device)
        return prompt


class Pool:
    """Idle sets of buffers of one model."""

    def __init__(self) -> None:
        self._idle: list[tuple[SetKey, Buffers]] = []
        self._lock = threading.RLock()  # a set may return at any allocation of the thread that takes one

    def take(self, key: SetKey) -> Buffers:
        with self._lock:
            for index in reversed(range(len(self._idle))):
                if self._idle[index][0] == key:
                    found = self._idle.pop(index)[1]
                    found.clear()
                    return found
        return Buffers()

    def put_back(self, sets: dict[SetKey, Buffers]) -> None:
        with self._lock:
            self._idle += sets.items()
            del self._idle[:-MAX_IDLE]
            while len(self._idle) > 1 and self.num_bytes > MAX_IDLE_BYTES:
                del self._idle[0]

    @property
    def num_bytes(self) -> int:
        """Memory of the idle sets."""
        return sum(buffers.num_bytes for _, buffers in self._idle)


_pools: WeakKeyDictionary[nn.Module, Pool] = WeakKeyDictionary()


def pool_of(module: nn.Module) -> Pool:
    """The pool of `module`; it lives as long as the module."""
    return _pools.setdefault(module, Pool())


class Lease:
    """The sets of buffers that the layers of one cache use, one for each capacity that they grow through.

    Args:
        cache: cache that shows the buffers. When it is gone, they return to the pool.
        pool: pool to take sets from and return them to.
    """

    def __init__(self, cache: Cache, pool: Pool):
        self._sets: dict[SetKey, Buffers] = {}
        self._pool, self._num_layers = pool, len(cache.layers)
        weakref.finalize(cache, pool.put_back, self._sets).atexit = False
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, PreallocatedLayer):
                layer.allocate = partial(self._allocate, index)

    def buffers(self, batch_size: int, capacity: int) -> Buffers:
        key = (batch_size, capacity)
        if key not in self._sets:
            self._sets[key] = self._pool.take(key)
        return self._sets[key]

    def place(self, layers: Sequence[Any], capacity: int) -> Stacks:
        """Moves every layer into the buffers of this capacity; returns the stacks of keys and values.

        Args:
            layers: `PreallocatedLayer`s that hold entries, all of the same batch size and the same shape.
        """
        keys, values = (self._stack(name, layers[0]._buffers[name], capacity) for name in ("keys", "values"))
        if all(_lies_in(layers[index], keys[index]) for index in (0, -1)):  # as after every round but the first
            return keys, values
        for index, layer in enumerate(layers):
            for name, stack in (("keys", keys), ("values", values)):
                if not _lies_in(layer, stack[index], name):
                    stack[index][:, :, : layer.length] = layer._buffers[name][:, :, : layer.length]
                    layer._buffers[name] = stack[index]
            layer._is_owned = True
        return keys, values

    def end(self, cache: Cache) -> None:
        """Gives the layers copies of their entries and the buffers back to the pool: others keep the cache."""
        for layer in cache.layers:
            if isinstance(layer, PreallocatedLayer):
                states = {name: buffer[:, :, : layer.length].clone() for name, buffer in layer._buffers.items()}
                layer._buffers, layer._is_owned, layer.allocate = states, False, None
        sets = dict(self._sets)
        self._sets.clear()  # nothing is left to return when the cache is gone
        self._pool.put_back(sets)
        _leases.pop(cache, None)

    def _allocate(self, layer_index: int, name: str, like: Tensor, num_entries: int) -> Tensor:
        """The `allocate` function of `PreallocatedLayer`."""
        return self._stack(name, like, capacity_for(num_entries))[layer_index]

    def _stack(self, name: str, like: Tensor, capacity: int) -> Tensor:
        """The buffer of all layers [L, B, heads, M, head_dim], so that entries of all of them move at once."""
        shape = (self._num_layers, *like.shape[:2], capacity, like.shape[3])
        return self.buffers(like.shape[0], capacity).tensor((name, *like.shape[1::2]), shape, like.dtype, like.device)


def _lies_in(layer: Any, buffer: Tensor, name: str = "keys") -> bool:
    """Whether a layer's entries are in this buffer."""
    return layer._is_owned and layer._buffers[name].data_ptr() == buffer.data_ptr()


_leases: WeakKeyDictionary[Cache, Lease] = WeakKeyDictionary()


def lease_of(cache: Cache, pool: Pool) -> Lease:
    """The lease of `cache`, made on first use. Its buffers keep their addresses from call to call."""
    if cache not in _leases:
        _leases[cache] = Lease(cache, pool)
    return _leases[cache]
