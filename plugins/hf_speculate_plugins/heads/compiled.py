"""Forwards of a head with fixed shapes, so that they can be compiled.

As the target's forwards: entries are padded to a fixed number, the cache's buffers have the next power of two of
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
from hf_speculate.target import NODE_BUCKETS, width_for
from hf_speculate.transfers import to_device
from hf_speculate.tree import additive

from .reading import Reading
from .sharing import SharingHead


Result = TypeVar("Result")


class CompiledForwards:
    """Compiled forwards of one head behind one reading.

    Args:
        head: one that has no `problem_with_head`.
        reading: what it has read; the layers that its cache has not yet are made.
        compiler: of the request.
    """

    def __init__(self, head: SharingHead[Any], reading: Reading, compiler: Compiler):
        self.head, self.reading, self.compiler = head, reading, compiler
        self._cache = reading.cache.cache
        layers = self._cache.layers
        layers += [PreallocatedLayer() for _ in range(head.spec.num_layers - len(layers))]
        lease_of(self._cache, pool_of(head))

    @property
    def end(self) -> int:
        """Entries that the cache holds."""
        return cast(PreallocatedLayer, self._cache.layers[0]).length

    def place(self, batch_size: int, capacity: int) -> tuple[list[tuple[Tensor, Tensor]], Buffers]:
        """Keys and values of each layer in buffers of this capacity, and the set that these are of."""
        lease = lease_of(self._cache, pool_of(self.head))
        return lease.place(self._cache.layers, capacity), lease.buffers(batch_size, capacity)

    def committed_mask(self, batch_size: int, capacity: int) -> Tensor:
        """The additive mask of what is committed [B, 1, 1, M]."""
        visible = self.reading.visible()
        seen = torch.zeros(batch_size, 1, 1, capacity, dtype=torch.bool, device=self.head.device)
        seen[..., : self.end] = True if visible is None else visible[:, None, None]
        return additive(seen, self.head.dtype)

    def append(
        self,
        function: Any,
        width: int,
        inputs: Sequence[Tensor],
        masks: Sequence[Tensor | None],
        plain: Callable[[], Result],
    ) -> Any | Result:
        """What `function(head, cache, *inputs, masks)`, compiled, or else `plain()` returns; it appends N entries.

        Args:
            width: N is padded to this, or if there are more to the next of `NODE_BUCKETS`; so are results.
            inputs: [B, N, ...] each.
            masks: additive [B or 1, 1, N, M + N] each, None: everything is seen; the first input is of their dtype.
        """
        (batch_size, count), head = inputs[0].shape[:2], self.head
        if count > NODE_BUCKETS[-1]:
            self.compiler.refuse(f"more than {NODE_BUCKETS[-1]} entries of a head at once")
            return plain()
        width = width if count <= width else width_for(count)
        end = self.end
        capacity = capacity_for(end + width)

        def arguments() -> tuple[Any, ...]:
            layers, buffers = self.place(batch_size, capacity)
            return head, *self._padded(layers, buffers, inputs, masks, width, capacity)

        key = (batch_size, width, capacity, head.dtype)
        result = self.compiler.run(head, head.device, key, function, arguments, plain)
        for layer in self._cache.layers:
            cast(PreallocatedLayer, layer).length = end + count
        return result

    def _padded(
        self,
        layers: list[tuple[Tensor, Tensor]],
        buffers: Buffers,
        inputs: Sequence[Tensor],
        masks: Sequence[Tensor | None],
        width: int,
        capacity: int,
    ) -> tuple[Any, ...]:
        """The arguments of a compiled function behind the head. Padding entries are copies of the first: finite."""
        end, count, device = self.end, inputs[0].shape[1], self.head.device
        slots = buffers.filled(("slots", width), torch.arange(end, end + width, device=device))
        whole_inputs = [padded(to_device(each, device), width) for each in inputs]
        placed = [buffers.filled((f"input {index}", width), each) for index, each in enumerate(whole_inputs)]
        whole = (padded_mask(mask, inputs[0], end + count, width, capacity) for mask in masks)
        placed_masks = [buffers.filled((f"mask {layer}", width), mask) for layer, mask in enumerate(whole)]
        return buffers.cache(layers, slots), *placed, placed_masks


def form_of(state: DraftState) -> tuple[bool, str]:
    """What a graph that chooses tokens is compiled for: whether the request samples, and how it warps logits."""
    return state.samples, str([(type(each).__name__, vars(each)) for each in state.warpers]) if state.samples else ""


def problem_with_head(head: SharingHead[Any]) -> str:
    """Why forwards of `head` cannot be captured, "" if they can."""
    modules = [module for module in head.shared.values() if module is not None]
    devices = {str(parameter.device) for module in modules for parameter in module.parameters()}
    return "a head on several devices" if devices - {str(head.device)} else ""
