"""Steps of a head with fixed shapes, so that they can be compiled: committed entries, a level of a tree, a whole tree.

As the target's forwards: entries are padded to a fixed number, the cache's buffers have the next power of two of
entries, and everything else that changes comes in as tensors at addresses that stay. The reference is `PlainSteps`.

A dynamic tree is one graph: every level of a small head launches some hundred tiny kernels, and what lies between them
on the host takes longer than they do. Its depth is one of few; of a tree that is to be less deep, the other levels are
computed for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.cache import PreallocatedLayer
from hf_speculate.compilation import Compiler, StaticLayer, capacity_for, lease_of, padded, padded_mask, pool_of
from hf_speculate.drafting import DraftState, Warpers, rank_children
from hf_speculate.target import NODE_BUCKETS, width_for
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree, TreePlan, additive

from ..heads import CachedAttention, Reading
from ..trees import Frontier, grow_tree, num_candidates
from .checkpoint import LoadedHead
from .head import EagleHead
from .options import EagleOptions
from .steps import PlainSteps, parent_states, tree_of_levels


# Levels of compiled trees. What compiles them unrolls them.
_DEPTHS = (2, 4, 8)

Result = TypeVar("Result")
Inputs = tuple[Tensor, Tensor, Tensor, Sequence[Tensor | None]]
"""Token ids [B, N], states [B, N, Hd], positions [B, N], and for each layer a mask [B or 1, 1, N, M + N] or None."""


def eagle_entries(head: EagleHead, cache: Cache, token_ids: Tensor, states: Tensor, positions: Tensor, masks: Any):
    return head(token_ids, states, positions, CachedAttention(cache, masks))


def eagle_level(head: EagleHead, cache: Cache, token_ids: Tensor, states: Tensor, positions: Tensor, masks: Any):
    return head.read(head(token_ids, states, positions, CachedAttention(cache, masks)))


def eagle_tree(
    head: EagleHead,
    layers: Sequence[tuple[Tensor, Tensor]],
    inputs: dict[str, Tensor],
    warpers: Warpers,
    depth: int,
    top_k: int,
    max_nodes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, parents and values of a dynamic tree [B, n].

    Args:
        layers: keys and values of each, `[B, heads, M, head_dim]`.
        inputs: `root` [B, Hd], the states that rank its children, and `root_ids` [B]; `starts` [B, 1], position of
            these children; `slots`, where the nodes that are run are written; `mask` [B, 1, 1, M], additive, of what is
            committed; `limit`, depth of the tree; `log_noise` [B, D, C] and `target_ids` [Vd], where there are any.
    """
    levels = _Levels(head, layers, inputs, warpers)
    tree = grow_tree(
        inputs["root_ids"],
        levels.scores(inputs["root"][:, None], 0)[:, 0],
        levels.expand,
        depth=depth,
        top_k=top_k,
        max_nodes=max_nodes,
        token_ids=inputs.get("target_ids"),
        limit=inputs["limit"],
    )
    assert tree.values is not None
    return tree.token_ids, tree.parents_on_device, tree.values


class _Levels:
    """What `eagle_tree` runs; arguments as there."""

    def __init__(
        self, head: EagleHead, layers: Sequence[tuple[Tensor, Tensor]], inputs: dict[str, Tensor], warpers: Warpers
    ):
        self._head, self._layers, self._inputs, self._warpers = head, layers, inputs, warpers

    def scores(self, hidden: Tensor, depth: int) -> Tensor:
        """Of the children of nodes at `depth` [B, N, C]; the states that these take are kept."""
        logits, self._fed_back = self._head.read(hidden)
        log_noise = self._inputs.get("log_noise")
        return rank_children(logits, None if log_noise is None else log_noise[:, depth], self._warpers)

    def expand(self, frontier: Frontier) -> Tensor:
        first, forest, inputs = frontier.num_cached, frontier.forest, self._inputs
        tokens, slots = forest.token_ids[:, first:], inputs["slots"]
        nodes = additive(forest.plan.ancestors[:, None, first:], inputs["mask"].dtype)
        mask = inputs["mask"].expand(-1, -1, nodes.shape[2], -1).index_copy(3, slots[: forest.num_nodes], nodes)
        written = slots[first : forest.num_nodes]
        cache = Cache(layers=[StaticLayer(keys, values, written) for keys, values in self._layers])
        attend = CachedAttention(cache, [mask] * len(self._layers))
        positions = (inputs["starts"] + frontier.depth - 1).expand(tokens.shape)
        states = parent_states(self._fed_back, frontier.previous_index)
        return self.scores(self._head(tokens, states, positions, attend), frontier.depth)


class CompiledSteps:
    """`Steps` whose forwards are compiled.

    Args:
        plain: does the same uncompiled.
        loaded: the head; one that has no `problem_with_head`.
        reading: what it has read; the layers that its cache has not yet are made.
        options: rows of forwards are the options' depth and width, more take the next of `NODE_BUCKETS`.
        compiler: of the request.
    """

    def __init__(
        self, plain: PlainSteps, loaded: LoadedHead, reading: Reading, options: EagleOptions, compiler: Compiler
    ):
        self._plain, self._reading, self._options, self._compiler = plain, reading, options, compiler
        self._loaded, self._head, self._target_ids = loaded, loaded.head, loaded.target_ids
        self._cache = reading.cache.cache
        layers = self._cache.layers
        layers += [PreallocatedLayer() for _ in range(len(self._head.layers) - len(layers))]
        lease_of(self._cache, pool_of(self._head))

    def entries(self, token_ids: Tensor, states: Tensor) -> Tensor:
        count = token_ids.shape[1]
        inputs = token_ids, states, *self._reading.next_place(count)
        plain = partial(self._plain.entries, token_ids, states)
        return self._run(eagle_entries, self._options.max_depth + 1, inputs, plain)[:, :count]

    def level(self, token_ids: Tensor, states: Tensor, plan: TreePlan) -> tuple[Tensor, Tensor]:
        count = token_ids.shape[1]
        inputs = token_ids, states, *self._reading.node_place(plan, count)
        plain = partial(self._plain.level, token_ids, states, plan)
        width = self._options.depth - 1 if self._head.spec.parallel else self._options.max_frontier
        logits, fed_back = self._run(eagle_level, width, inputs, plain)
        return logits[:, :count], fed_back[:, :count]

    def tree(self, root: Tensor, state: DraftState, depth: int) -> DraftTree:
        """As one graph, but for heads with windows: these are compiled level by level."""
        head, options = self._head, self._options
        if self._reading.has_windows:
            return tree_of_levels(self._loaded, options, self.level, root, state, depth)
        key: Any = self._compiler.choose(head, head.device, eagle_tree, self._tree_keys(len(root), state, depth))

        def arguments() -> tuple[Any, ...]:
            return self._tree_arguments(key, root, state, depth)

        plain = partial(self._plain.tree, root, state, depth)
        result = self._compiler.run(head, head.device, key, eagle_tree, arguments, plain)
        if isinstance(result, DraftTree):
            return result
        count = 1 + num_candidates(depth, min(options.top_k, head.spec.draft_vocab_size))
        tokens, parents, values = (each[:, :count] for each in result)
        return DraftTree(tokens, parents, max_depth=depth, values=values)

    def _tree_keys(self, batch_size: int, state: DraftState, depth: int) -> list[Any]:
        """Of the graphs that can grow a tree of this depth, the least deep first."""
        options = self._options
        warpers = str([(type(each).__name__, vars(each)) for each in state.warpers]) if state.samples else ""
        form = self._head.dtype, state.samples, warpers

        def key_of(levels: int) -> tuple[Any, ...]:
            shape = levels, options.top_k, options.max_nodes
            return batch_size, capacity_for(self._end + self._num_run(levels)), shape, *form

        return [key_of(min(levels, options.depth)) for levels in (*_DEPTHS, options.depth) if levels >= depth]

    def _num_run(self, levels: int) -> int:
        """Nodes that are run for a tree; those of the deepest level are not."""
        return max(levels - 1, 1) * min(self._options.top_k, self._head.spec.draft_vocab_size)

    def _tree_arguments(self, key: tuple[Any, ...], root: Tensor, state: DraftState, depth: int) -> tuple[Any, ...]:
        """The arguments of `eagle_tree`, its inputs in buffers."""
        (batch_size, capacity, shape), head = key[:3], self._head
        levels = shape[0]
        inputs = {
            "root": root,
            "root_ids": to_device(state.root_ids, head.device),
            "starts": self._reading.positions_at(torch.zeros(1, 1, dtype=torch.long)),
            "limit": to_device([depth], head.device),
            "slots": torch.arange(self._end, self._end + self._num_run(levels), device=head.device),
            "mask": self._committed_mask(batch_size, capacity),
        }
        log_noise = state.log_noise(range(levels), head.spec.draft_vocab_size, self._target_ids)
        if log_noise is not None:
            inputs["log_noise"] = log_noise.to(head.device)
        lease = lease_of(self._cache, pool_of(head))
        layers, buffers = lease.place(self._cache.layers, capacity), lease.buffers(batch_size, capacity)
        inputs = {name: buffers.filled((f"tree {name}", levels), each) for name, each in inputs.items()}
        if self._target_ids is not None:
            inputs["target_ids"] = self._target_ids
        return head, layers, inputs, tuple(state.warpers), *shape

    @property
    def _end(self) -> int:
        """Entries that the cache holds."""
        return cast(PreallocatedLayer, self._cache.layers[0]).length

    def _committed_mask(self, batch_size: int, capacity: int) -> Tensor:
        """The additive mask of what is committed [B, 1, 1, M]."""
        visible = self._reading.visible()
        seen = torch.zeros(batch_size, 1, 1, capacity, dtype=torch.bool, device=self._head.device)
        seen[..., : self._end] = True if visible is None else visible[:, None, None]
        return additive(seen, self._head.dtype)

    def _run(self, function: Any, width: int, inputs: Inputs, plain: Callable[[], Result]) -> Result:
        (batch_size, count), head = inputs[0].shape, self._head
        if count > NODE_BUCKETS[-1]:
            self._compiler.refuse(f"more than {NODE_BUCKETS[-1]} entries of a head at once")
            return plain()
        width = width if count <= width else width_for(count)
        end = self._end
        capacity = capacity_for(end + width)

        def arguments() -> tuple[Any, ...]:
            return head, *self._placed(inputs, width, end, capacity)

        key = (batch_size, width, capacity, head.dtype)
        result = self._compiler.run(head, head.device, key, function, arguments, plain)
        for layer in self._cache.layers:
            cast(PreallocatedLayer, layer).length = end + count
        return result

    def _placed(self, inputs: Inputs, width: int, end: int, capacity: int) -> tuple[Any, ...]:
        """The arguments of a compiled function behind the head. Padding entries are copies of the first: finite."""
        token_ids, states, positions, masks = inputs
        (batch_size, count), device = token_ids.shape, self._head.device
        lease = lease_of(self._cache, pool_of(self._head))
        layers = lease.place(self._cache.layers, capacity)
        buffers = lease.buffers(batch_size, capacity)
        slots = buffers.filled(("slots", width), torch.arange(end, end + width, device=device))
        whole_inputs = [padded(to_device(each, device), width) for each in (token_ids, states, positions)]
        placed = [buffers.filled((f"input {index}", width), each) for index, each in enumerate(whole_inputs)]
        whole = (padded_mask(mask, states, end + count, width, capacity) for mask in masks)
        placed_masks = [buffers.filled((f"mask {layer}", width), mask) for layer, mask in enumerate(whole)]
        return buffers.cache(layers, slots), *placed, placed_masks


def problem_with_head(head: EagleHead) -> str:
    """Why forwards of `head` cannot be captured, "" if they can."""
    modules = [module for module in head.shared.values() if module is not None]
    devices = {str(parameter.device) for module in modules for parameter in module.parameters()}
    return "a head on several devices" if devices - {str(head.device)} else ""
