"""Forwards of a head with static shapes, so that they can be compiled: what a round committed, and a level of a tree.

As the target's (`hf_speculate.static`): entries are padded to a fixed number, the cache's buffers have the next power
of two of entries, and everything else that changes comes in as tensors at addresses that stay. The plain reference is
`Reading` without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.buffers import capacity_for, lease_of, pool_of
from hf_speculate.cache import TreeCache
from hf_speculate.graphs import Compiler
from hf_speculate.layers import PreallocatedLayer
from hf_speculate.static import NODE_BUCKETS, width_for

from .attending import CachedAttention
from .head import EagleHead


Result = TypeVar("Result")
Inputs = tuple[Tensor, Tensor, Tensor, Sequence[Tensor | None]]
"""Token ids [B, N], states [B, N, Hd], positions [B, N], and for each layer a mask [B or 1, 1, N, M + N] or None."""


def eagle_entries(head: EagleHead, cache: Cache, token_ids: Tensor, states: Tensor, positions: Tensor, masks: Any):
    return head(token_ids, states, positions, CachedAttention(cache, masks))


def eagle_level(head: EagleHead, cache: Cache, token_ids: Tensor, states: Tensor, positions: Tensor, masks: Any):
    return head.read(head(token_ids, states, positions, CachedAttention(cache, masks)))


class StaticSteps:
    """The compiled forwards of one request's head.

    Args:
        head: the head; one that has no `problem_with_head`.
        cache: its cache; the layers that it has not yet are made.
        compiler: of the request.
        num_entries: rows of a forward over what a round committed; more take the next of `NODE_BUCKETS`.
        num_nodes: likewise of a forward over a level of a tree.
    """

    def __init__(self, head: EagleHead, cache: TreeCache, compiler: Compiler, num_entries: int, num_nodes: int):
        self._head, self._cache, self._compiler = head, cache, compiler
        self._num_entries, self._num_nodes = num_entries, num_nodes
        layers = cache.cache.layers
        layers += [PreallocatedLayer() for _ in range(len(head.layers) - len(layers))]
        lease_of(cache.cache, pool_of(head))

    def entries(self, inputs: Inputs, plain: Callable[[], Tensor]) -> Tensor:
        """The states of new entries [B, N, Hd], which the cache then holds; `plain` does the same uncompiled."""
        count = inputs[0].shape[1]
        hidden = self._run(eagle_entries, self._num_entries, inputs, plain)
        return hidden[:, :count]

    def level(self, inputs: Inputs, plain: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """`EagleHead.read` of the states of new nodes."""
        count = inputs[0].shape[1]
        logits, fed_back = self._run(eagle_level, self._num_nodes, inputs, plain)
        return logits[:, :count], fed_back[:, :count]

    def _run(self, function: Any, width: int, inputs: Inputs, plain: Callable[[], Result]) -> Result:
        (batch_size, count), head = inputs[0].shape, self._head
        if count > NODE_BUCKETS[-1]:
            self._compiler.refuse(f"more than {NODE_BUCKETS[-1]} entries of a head at once")
            return plain()
        width = width if count <= width else width_for(count)
        end = cast(PreallocatedLayer, self._cache.cache.layers[0]).length
        capacity = capacity_for(end + width)

        def arguments() -> tuple[Any, ...]:
            return head, *self._placed(inputs, width, end, capacity)

        key = (function.__name__, batch_size, width, capacity, head.dtype)
        result = self._compiler.run(head, head.device, key, function, arguments, plain)
        for layer in self._cache.cache.layers:
            cast(PreallocatedLayer, layer).length = end + count
        return result

    def _placed(self, inputs: Inputs, width: int, end: int, capacity: int) -> tuple[Any, ...]:
        """The arguments of a compiled function behind the head. Padding entries are copies of the first: finite."""
        token_ids, states, positions, masks = inputs
        (batch_size, count), device = token_ids.shape, self._head.device
        lease = lease_of(self._cache.cache, pool_of(self._head))
        layers = lease.place(self._cache.cache.layers, capacity)
        buffers = lease.buffers(batch_size, capacity)
        slots = buffers.filled(("slots", width), torch.arange(end, end + width, device=device))
        padded = [_padded(each.to(device), width) for each in (token_ids, states, positions)]
        placed = [buffers.filled((f"input {index}", width), each) for index, each in enumerate(padded)]
        static = []
        for layer, mask in enumerate(masks):
            full = states.new_full((batch_size, 1, width, capacity), torch.finfo(states.dtype).min)
            full[:, :, :count, : end + count] = 0 if mask is None else mask
            full[:, :, count:] = full[:, :, :1]
            static.append(buffers.filled((f"mask {layer}", width), full))
        return buffers.cache(layers, slots), *placed, static


def problem_with_head(head: EagleHead) -> str:
    """Why forwards of `head` cannot be captured, "" if they can."""
    modules = [module for module in head.shared.values() if module is not None]
    devices = {str(parameter.device) for module in modules for parameter in module.parameters()}
    return "a head on several devices" if devices - {str(head.device)} else ""


def _padded(inputs: Tensor, width: int) -> Tensor:
    missing = width - inputs.shape[1]
    return torch.cat([inputs, inputs[:, :1].expand(-1, missing, *inputs.shape[2:])], dim=1) if missing else inputs
