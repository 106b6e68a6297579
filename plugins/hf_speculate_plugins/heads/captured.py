"""Forwards of a head with fixed shapes, so that they can be compiled.

They work like the target's: entries are padded to a fixed number, the cache's buffers hold the next power of two of
entries, and everything else that changes comes in as tensors at addresses that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hf_speculate.attention import kernel_fits, prompt_starts, tree_backends
from hf_speculate.cache import PreallocatedLayer
from hf_speculate.forward import NODE_BUCKETS, width_for
from hf_speculate.graphs import (
    Buffers,
    GraphRunner,
    PromptMasks,
    Stacks,
    capacity_for,
    lease_of,
    padded,
    padded_mask,
    pool_of,
)
from hf_speculate.stats import RunnerRecord
from hf_speculate.transfers import to_device

from .head import LoadedHead, SharingHead
from .head_cache import HeadCache


Result = TypeVar("Result")


class CapturedForwards:
    """Captured forwards of one head over one head cache. The request's record counts them."""

    def __init__(
        self,
        plain: Any,
        loaded: LoadedHead[Any],
        head_cache: HeadCache,
        options: Any,
        runner: GraphRunner,
        record: RunnerRecord,
    ):
        self._record = record
        self._plain, self._head_cache, self._options, self._runner = plain, head_cache, options, runner
        self._loaded, self._head = loaded, loaded.head
        self._cache = head_cache.tree_cache.cache
        layers = self._cache.layers
        layers += [PreallocatedLayer() for _ in range(self._head.spec.num_layers - len(layers))]
        self._prompts = PromptMasks()
        lease_of(self._cache, pool_of(self._head))

    @property
    def end(self) -> int:
        """Number of entries in the cache."""
        return cast(PreallocatedLayer, self._cache.layers[0]).length

    def place(self, batch_size: int, capacity: int) -> tuple[Stacks, Buffers]:
        """Keys and values of all layers in buffers of this capacity, and the set of these buffers."""
        lease = lease_of(self._cache, pool_of(self._head))
        return lease.place(self._cache.layers, capacity), lease.buffers(batch_size, capacity)

    def prompt(self, buffers: Buffers, batch_size: int, capacity: int) -> Tensor:
        """Whether entries are real [B, M], apart from where rows end."""
        return self._prompts.place(buffers, (batch_size, capacity), self._head.device, self._head_cache.prompt_mask)

    def starts(self, buffers: Buffers) -> dict[str, Tensor]:
        """`starts` [B], the number of padding entries of each row, if the kernel for trees computes attention."""
        if self._starts is None:
            return {}
        return {"starts": self._prompts.place_starts(buffers, self._starts, self._head.device)}

    @cached_property
    def _starts(self) -> list[int] | None:
        head, head_cache = self._head, self._head_cache
        is_possible = self._runner.backend is None and head.attends_by_kernel
        if not is_possible or not kernel_fits(head.dtype, head.device):
            return None
        return prompt_starts(head_cache.prompt_mask, len(head_cache.tree_cache.lengths))

    def append(
        self,
        function: Any,
        width: int,
        inputs: Sequence[Tensor],
        masks: Sequence[Tensor | None],
        plain: Callable[[], Result],
    ) -> Any | Result:
        """Runs `function(head, stacks, slots, *inputs, masks)` compiled, or else `plain()`; appends N entries.

        Args:
            width: number that N is padded to. A larger N takes the next of `NODE_BUCKETS`. Results are padded, too.
            inputs: tensors [B, N, ...].
            masks: additive masks [B or 1, 1, N, M + N] in the first input's dtype; None: every entry sees all.
        """
        (batch_size, count), head = inputs[0].shape[:2], self._head
        if count > NODE_BUCKETS[-1]:
            self._record.refuse(self._runner.state, f"more than {NODE_BUCKETS[-1]} entries of a head at once")
            return plain()
        width = width if count <= width else width_for(count)
        end = self.end
        capacity = capacity_for(end + width)

        def arguments() -> tuple[Any, ...]:
            # Padding entries are copies of the first: finite.
            stacks, buffers = self.place(batch_size, capacity)
            slots = buffers.filled(
                ("slots", width), torch.arange(end, end + width, device=head.device, dtype=torch.long)
            )
            whole = [padded(to_device(tensor, head.device), width) for tensor in inputs]
            placed = [buffers.filled((f"input {index}", width), tensor) for index, tensor in enumerate(whole)]
            seen = (padded_mask(mask, inputs[0], end + count, width, capacity) for mask in masks)
            placed_masks = [buffers.filled((f"mask {layer}", width), mask) for layer, mask in enumerate(seen)]
            return head, stacks, slots, *placed, placed_masks

        key = (batch_size, width, capacity, head.dtype)
        result = self.run(key, function, arguments, plain)
        for layer in self._cache.layers:
            cast(PreallocatedLayer, layer).length = end + count
        return result

    def run(
        self, key: Any, function: Any, arguments: Callable[[], tuple[Any, ...]], plain: Callable[[], Result]
    ) -> Any | Result:
        """`GraphRunner.run` for this head, with the attention backends of our forwards."""
        with tree_backends(self._head.device):
            return self._runner.run(self._head, self._head.device, key, function, arguments, plain, self._record)


def problem_with_head(head: SharingHead[Any]) -> str:
    """The reason why forwards of `head` cannot be captured; "" if they can."""
    if head.spec.rope.get("rope_type") == "dynamic":
        return "a head with RoPE that depends on the longest position"
    modules = [module for module in head.shared.values() if module is not None]
    devices = {str(parameter.device) for module in modules for parameter in module.parameters()}
    return "a head on several devices" if devices - {str(head.device)} else ""
