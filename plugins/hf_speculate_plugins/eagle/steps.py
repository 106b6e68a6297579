"""Drafting with static shapes, so that it can be compiled: what a round committed, a level of a tree, a whole tree.

As the target's forwards (`hf_speculate.target.static`): entries are padded to a fixed number, the cache's buffers have
the next power of two of entries, and everything else that changes comes in as tensors at addresses that stay. The plain
reference is `Reading` without them.

A dynamic tree is one graph: every level of a small head launches some hundred tiny kernels, and what lies between them
on the host takes longer than they do. Its depth is one of few; of a tree that is to be less deep, the other levels are
computed for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.cache import PreallocatedLayer, TreeCache
from hf_speculate.compilation import Compiler, StaticLayer, capacity_for, lease_of, pool_of
from hf_speculate.drafting import DraftState, Warpers, rank_children
from hf_speculate.target import NODE_BUCKETS, width_for
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree, additive

from ..growth import Frontier, grow_tree, num_candidates
from .attending import CachedAttention
from .head import EagleHead


if TYPE_CHECKING:
    from .drafter import EagleOptions

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
) -> tuple[Tensor, Tensor]:
    """Tokens and parents of a dynamic tree [B, n].

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
    return tree.token_ids, tree.parents_on_device


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


def parent_states(states: Tensor, index: Tensor) -> Tensor:
    """`states[b, index[b, f]]`, [B, F, Hd]."""
    return states.gather(1, index.to(states.device)[..., None].expand(-1, -1, states.shape[-1]))


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

    @property
    def _end(self) -> int:
        """Entries that the cache holds."""
        return cast(PreallocatedLayer, self._cache.cache.layers[0]).length

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

    def tree(
        self,
        root: Tensor,
        starts: Tensor,
        visible: Tensor | None,
        state: DraftState,
        target_ids: Tensor | None,
        options: EagleOptions,
        depth: int,
        plain: Callable[[], DraftTree],
    ) -> DraftTree:
        """A dynamic tree behind what is committed; `plain` grows the same one uncompiled.

        Args:
            root: [B, Hd], states of the entry committed last.
            starts: int64 [B, 1], position of the root's children.
            visible: bool [B, M], which committed entries are real; None if all are.
            depth: of this tree, at most `options.depth`.
        """
        head = self._head
        key: Any = self._compiler.choose(
            head, head.device, eagle_tree, self._tree_keys(len(root), state, options, depth)
        )

        def arguments() -> tuple[Any, ...]:
            inputs = {"root": root, "root_ids": to_device(state.root_ids, head.device), "starts": starts}
            inputs["limit"] = to_device([depth], head.device)
            return self._tree_arguments(key, inputs, visible, state, target_ids)

        result = self._compiler.run(head, head.device, key, eagle_tree, arguments, plain)
        if isinstance(result, DraftTree):
            return result
        count = 1 + num_candidates(depth, min(options.top_k, head.spec.draft_vocab_size))
        tokens, parents = (each[:, :count] for each in result)
        return DraftTree(tokens, parents, max_depth=depth)

    def _tree_keys(self, batch_size: int, state: DraftState, options: EagleOptions, depth: int) -> list[Any]:
        """Of the graphs that can grow a tree of this depth, the least deep first."""
        warpers = str([(type(each).__name__, vars(each)) for each in state.warpers]) if state.samples else ""
        form = self._head.dtype, state.samples, warpers

        def key_of(levels: int) -> tuple[Any, ...]:
            shape = levels, options.top_k, options.max_nodes
            return batch_size, capacity_for(self._end + self._num_run(*shape)), shape, *form

        return [key_of(min(levels, options.depth)) for levels in (*_DEPTHS, options.depth) if levels >= depth]

    def _num_run(self, levels: int, top_k: int, _max_nodes: int) -> int:
        """Nodes that are run for a tree; those of the deepest level are not."""
        return max(levels - 1, 1) * min(top_k, self._head.spec.draft_vocab_size)

    def _tree_arguments(
        self,
        key: tuple[Any, ...],
        inputs: dict[str, Tensor],
        visible: Tensor | None,
        state: DraftState,
        target_ids: Tensor | None,
    ) -> tuple[Any, ...]:
        """The arguments of `eagle_tree`, `inputs` among them in buffers."""
        (batch_size, capacity, shape), head = key[:3], self._head
        inputs["slots"] = torch.arange(self._end, self._end + self._num_run(*shape), device=head.device)
        inputs["mask"] = self._seen(visible, batch_size, capacity)
        log_noise = state.log_noise(range(shape[0]), head.spec.draft_vocab_size, target_ids)
        if log_noise is not None:
            inputs["log_noise"] = log_noise.to(head.device)
        lease = lease_of(self._cache.cache, pool_of(head))
        layers, buffers = lease.place(self._cache.cache.layers, capacity), lease.buffers(batch_size, capacity)
        inputs = {name: buffers.filled((f"tree {name}", shape[0]), each) for name, each in inputs.items()}
        if target_ids is not None:
            inputs["target_ids"] = target_ids
        return head, layers, inputs, tuple(state.warpers), *shape

    def _seen(self, visible: Tensor | None, batch_size: int, capacity: int) -> Tensor:
        """The additive mask of what is committed [B, 1, 1, M]."""
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
        padded = [_padded(to_device(each, device), width) for each in (token_ids, states, positions)]
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
