"""Steps of a head with fixed shapes, so that they can be compiled: committed entries, a level of a tree, a whole tree.

See `CompiledForwards`. The reference is `PlainSteps`.

A dynamic tree is one graph: every level of a small head launches some hundred tiny kernels, and what lies between them
on the host takes longer than they do. Its depth is one of few; of a tree that is to be less deep, the other levels are
computed for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.compilation import Compiler, StaticLayer, capacity_for
from hf_speculate.drafting import DraftState, Warpers, rank_children
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree, TreePlan, additive

from ..heads import CachedAttention, CompiledForwards, Reading, form_of
from ..trees import Frontier, grow_tree, num_candidates
from .checkpoint import LoadedHead
from .head import EagleHead
from .options import EagleOptions, TreeSize
from .steps import Pending, PlainSteps, parent_states, tree_of_levels


# Levels of compiled trees. What compiles them unrolls them.
_DEPTHS = (2, 4, 8)


def eagle_entries(head: EagleHead, cache: Cache, states: Tensor, token_ids: Tensor, positions: Tensor, masks: Any):
    return head(token_ids, states, positions, CachedAttention(cache, masks))


def eagle_level(head: EagleHead, cache: Cache, states: Tensor, token_ids: Tensor, positions: Tensor, masks: Any):
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
        self._forwards = CompiledForwards(loaded.head, reading, compiler)

    def entries(self, token_ids: Tensor, states: Tensor) -> Tensor:
        count = token_ids.shape[1]
        positions, masks = self._reading.next_place(count)
        plain = partial(self._plain.entries, token_ids, states)
        inputs, width = (states, token_ids, positions), self._options.max_depth + 1
        return self._forwards.append(eagle_entries, width, inputs, masks, plain)[:, :count]

    def level(self, token_ids: Tensor, states: Tensor, plan: TreePlan) -> tuple[Tensor, Tensor]:
        count = token_ids.shape[1]
        positions, masks = self._reading.node_place(plan, count)
        plain = partial(self._plain.level, token_ids, states, plan)
        inputs = states, token_ids, positions
        width = self._options.depth - 1 if self._head.spec.parallel else self._options.max_frontier
        logits, fed_back = self._forwards.append(eagle_level, width, inputs, masks, plain)
        return logits[:, :count], fed_back[:, :count]

    def tree(self, root: Tensor, state: DraftState, size: TreeSize) -> DraftTree:
        """As one graph, but for heads with windows: these are compiled level by level."""
        head = self._head
        if self._reading.has_windows:
            return tree_of_levels(self._loaded, self.level, root, state, size)
        key: Any = self._compiler.choose(head, head.device, eagle_tree, self._tree_keys(len(root), state, size))

        def arguments() -> tuple[Any, ...]:
            return self._tree_arguments(key, root, state, size.depth)

        plain = partial(self._plain.tree, root, state, size)
        result = self._compiler.run(head, head.device, key, eagle_tree, arguments, plain)
        if isinstance(result, DraftTree):
            return result
        count = 1 + num_candidates(size.depth, min(size.width, head.spec.draft_vocab_size))
        tokens, parents, values = (each[:, :count] for each in result)
        return DraftTree(tokens, parents, max_depth=size.depth, values=values)

    def tree_behind(self, pending: Pending, state: DraftState, size: TreeSize) -> None:
        return None

    def _tree_keys(self, batch_size: int, state: DraftState, size: TreeSize) -> list[Any]:
        """Of the graphs that can grow a tree of this size, the least deep first."""
        deepest = self._options.max_depth
        form = self._head.dtype, *form_of(state)

        def key_of(levels: int) -> tuple[Any, ...]:
            shape = levels, size.width, size.max_nodes
            return batch_size, capacity_for(self._forwards.end + self._num_run(levels, size.width)), shape, *form

        return [key_of(min(levels, deepest)) for levels in (*_DEPTHS, deepest) if levels >= size.depth]

    def _num_run(self, levels: int, width: int) -> int:
        """Nodes that are run for a tree; those of the deepest level are not."""
        return max(levels - 1, 1) * min(width, self._head.spec.draft_vocab_size)

    def _tree_arguments(self, key: tuple[Any, ...], root: Tensor, state: DraftState, depth: int) -> tuple[Any, ...]:
        """The arguments of `eagle_tree`, its inputs in buffers."""
        (batch_size, capacity, shape), head = key[:3], self._head
        (levels, width, _), end = shape, self._forwards.end
        inputs = {
            "root": root,
            "root_ids": to_device(state.root_ids, head.device),
            "starts": self._reading.positions_at(torch.zeros(1, 1, dtype=torch.long)),
            "limit": to_device([depth], head.device),
            "slots": torch.arange(end, end + self._num_run(levels, width), device=head.device),
            "mask": self._forwards.committed_mask(batch_size, capacity),
        }
        log_noise = state.log_noise(range(levels), head.spec.draft_vocab_size, self._target_ids)
        if log_noise is not None:
            inputs["log_noise"] = log_noise.to(head.device)
        layers, buffers = self._forwards.place(batch_size, capacity)
        inputs = {name: buffers.filled((f"tree {name}", levels), each) for name, each in inputs.items()}
        if self._target_ids is not None:
            inputs["target_ids"] = self._target_ids
        return head, layers, inputs, tuple(state.warpers), *shape
