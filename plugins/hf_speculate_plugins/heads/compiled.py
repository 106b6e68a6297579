"""Forwards of a head with fixed shapes, so that they can be compiled.

They work like the target's: entries are padded to a fixed number, the cache's buffers hold the next power of two of
entries, and everything else that changes comes in as tensors at addresses that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hf_speculate.cache import PreallocatedLayer
from hf_speculate.compilation import Buffers, Compiler, capacity_for, lease_of, padded, padded_mask, pool_of
from hf_speculate.drafting import DraftState
from hf_speculate.scoring import NODE_BUCKETS, width_for
from hf_speculate.transfers import to_device
from hf_speculate.tree import additive

from .head import LoadedHead, SharingHead
from .reading import Reading


Result = TypeVar("Result")


class CompiledForwards:
    """Compiled forwards of one head behind one reading.

    Args:
        plain: the same forwards uncompiled.
        loaded: a head that has no `problem_with_head`.
        reading: entries that it has read; layers that its cache lacks are made.
        options: options of drafting, of which the sizes of forwards follow.
        compiler: the request's compiler.
    """

    def __init__(self, plain: Any, loaded: LoadedHead[Any], reading: Reading, options: Any, compiler: Compiler):
        self._plain, self._reading, self._options, self._compiler = plain, reading, options, compiler
        self._loaded, self._head = loaded, loaded.head
        self._cache = reading.cache.cache
        layers = self._cache.layers
        layers += [PreallocatedLayer() for _ in range(self._head.spec.num_layers - len(layers))]
        lease_of(self._cache, pool_of(self._head))

    @property
    def end(self) -> int:
        """Number of entries in the cache."""
        return cast(PreallocatedLayer, self._cache.layers[0]).length

    def place(self, batch_size: int, capacity: int) -> tuple[list[tuple[Tensor, Tensor]], Buffers]:
        """Keys and values of each layer in buffers of this capacity, and the set of these buffers."""
        lease = lease_of(self._cache, pool_of(self._head))
        return lease.place(self._cache.layers, capacity), lease.buffers(batch_size, capacity)

    def committed_mask(self, batch_size: int, capacity: int) -> Tensor:
        """The additive mask of committed entries [B, 1, 1, M]."""
        visible = self._reading.visible()
        seen = torch.zeros(batch_size, 1, 1, capacity, dtype=torch.bool, device=self._head.device)
        seen[..., : self.end] = True if visible is None else visible[:, None, None]
        return additive(seen, self._head.dtype)

    def append(
        self,
        function: Any,
        width: int,
        inputs: Sequence[Tensor],
        masks: Sequence[Tensor | None],
        plain: Callable[[], Result],
    ) -> Any | Result:
        """Runs `function(head, cache, *inputs, masks)` compiled, or else `plain()`; appends N entries.

        Args:
            width: number that N is padded to. A larger N takes the next of `NODE_BUCKETS`. Results are padded, too.
            inputs: tensors [B, N, ...].
            masks: additive masks [B or 1, 1, N, M + N] in the first input's dtype; None: every entry sees all.
        """
        (batch_size, count), head = inputs[0].shape[:2], self._head
        if count > NODE_BUCKETS[-1]:
            self._compiler.refuse(f"more than {NODE_BUCKETS[-1]} entries of a head at once")
            return plain()
        width = width if count <= width else width_for(count)
        end = self.end
        capacity = capacity_for(end + width)

        def arguments() -> tuple[Any, ...]:
            # Padding entries are copies of the first: finite.
            layers, buffers = self.place(batch_size, capacity)
            slots = buffers.filled(("slots", width), torch.arange(end, end + width, device=head.device))
            whole = [padded(to_device(each, head.device), width) for each in inputs]
            placed = [buffers.filled((f"input {index}", width), each) for index, each in enumerate(whole)]
            seen = (padded_mask(mask, inputs[0], end + count, width, capacity) for mask in masks)
            placed_masks = [buffers.filled((f"mask {layer}", width), mask) for layer, mask in enumerate(seen)]
            return head, buffers.cache(layers, slots), *placed, placed_masks

        key = (batch_size, width, capacity, head.dtype)
        result = self._compiler.run(head, head.device, key, function, arguments, plain)
        for layer in self._cache.layers:
            cast(PreallocatedLayer, layer).length = end + count
        return result


def form_of(state: DraftState) -> tuple[bool, str]:
    """The part of a graph's key that the choice of tokens decides: whether the request samples, and its warpers."""
    return state.samples, str([(type(each).__name__, vars(each)) for each in state.warpers]) if state.samples else ""


def problem_with_head(head: SharingHead[Any]) -> str:
    """The reason why forwards of `head` cannot be captured; "" if they can."""
    modules = [module for module in head.shared.values() if module is not None]
    devices = {str(parameter.device) for module in modules for parameter in module.parameters()}
    return "a head on several devices" if devices - {str(head.device)} else ""
