"""Forwards of an EAGLE session behind one reading, plain and compiled: read entries, run a level, grow a tree.

Forwards append entries; the session tells the reading which of them stay.

A compiled dynamic tree is one graph: every level of a small head launches some hundred tiny kernels, and the host takes
longer between them than they do. Its depth is one of few; for a tree that is to be less deep, the graph computes the
other levels for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.compilation import StaticLayer, capacity_for
from hf_speculate.drafting import DraftState, Warpers, rank_children
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree, TreePlan, additive

from ..heads import CachedAttention, CompiledForwards, LoadedHead, Reading, form_of
from ..trees import Frontier, grow_tree, num_candidates
from .head import EagleHead
from .spec import EagleOptions, TreeSize


Pending = tuple[Tensor, Sequence[Tensor], list[int]]
"""Committed entries that are yet to be read: tokens [B, J], the target's features [B, J, Ht], lengths."""

Native = Callable[[Tensor, Tensor, Tensor, Cache, Sequence[Tensor | None]], Tensor | None]
"""`NativeForward`: runs entries (token ids, states, positions, cache, masks); None where the modules have to."""

RunLevel = Callable[[Tensor, Tensor, TreePlan], tuple[Tensor, Tensor]]
"""`PlainSteps.level`."""

# Entries of a prompt that are run at once: a mask of the whole prompt would be quadratic in its length.
_CHUNK = 1024


class PlainSteps:
    """Forwards of the modules as they are; the reference.

    Args:
        loaded: the head.
        reading: entries that it has read.
        native: forward that runs instead of the head's where it can.
    """

    def __init__(self, loaded: LoadedHead[EagleHead], reading: Reading, native: Native | None = None):
        self._loaded, self._reading, self._native = loaded, reading, native

    @torch.no_grad()
    def entries(self, token_ids: Int[Tensor, "B J"], states: Float[Tensor, "B J Hd"]) -> Float[Tensor, "B J Hd"]:
        """Runs the entries of a round, with the states of its features; returns states before the final norm."""
        positions, masks = self._reading.next_place(token_ids.shape[1])
        return self._run(token_ids, states, positions, masks)

    @torch.no_grad()
    def level(
        self, token_ids: Int[Tensor, "B F"], states: Float[Tensor, "B F Hd"], plan: TreePlan
    ) -> tuple[Float[Tensor, "B F Vd"], Float[Tensor, "B F Hd"]]:
        """Runs the last F nodes of a forest whose earlier nodes were run since the last `Reading.drop`.

        Args:
            plan: structure of the forest, its roots being children of the entry committed last.
        Returns:
            `EagleHead.read` of these nodes.
        """
        positions, masks = self._reading.node_place(plan, token_ids.shape[1])
        return self._loaded.head.read(self._run(token_ids, states, positions, masks))

    def tree(self, root: Float[Tensor, "B Hd"], state: DraftState, size: TreeSize) -> DraftTree:
        """A dynamic tree behind the entry committed last, whose states are `root`."""
        return tree_of_levels(self._loaded, self.level, root, state, size)

    def tree_behind(self, pending: Pending, state: DraftState, size: TreeSize) -> tuple[DraftTree, Tensor] | None:
        """Commits pending entries and draws a dynamic tree behind them; returns it with the states of the last entry.

        None, and nothing done, where the one has to be done after the other.
        """
        return None

    def _run(self, token_ids: Tensor, states: Tensor, positions: Tensor, masks: list[Tensor | None]) -> Tensor:
        cache = self._reading.cache.cache
        if self._native is not None:
            hidden = self._native(token_ids, states, positions, cache, masks)
            if hidden is not None:
                return hidden
        return self._loaded.head(token_ids, states, positions, CachedAttention(cache, masks))


@torch.no_grad()
def read_prompt(
    head: EagleHead,
    reading: Reading,
    token_ids: Int[Tensor, "B J"],
    states: Float[Tensor, "B J Hd"],
    native: Native | None = None,
) -> Float[Tensor, "B Hd"]:
    """Commits the prompt's entries, padding included; returns the states of the last one. Prompts have many lengths:
    this is never compiled.

    Args:
        native: forward that runs short prompts, where it can.
    """
    hidden = states
    for start in range(0, token_ids.shape[1], _CHUNK):
        part = slice(start, min(start + _CHUNK, token_ids.shape[1]))
        positions, masks = reading.prompt_place(part)
        entries = token_ids[:, part], states[:, part], positions
        found = None
        if native is not None and masks is None:
            found = native(*entries, reading.cache.cache, [None] * len(head.layers))
        if found is None:
            is_causal = masks is None and part.stop - start > 1
            found = head(*entries, CachedAttention(reading.cache.cache, masks, is_causal=is_causal))
        hidden = found
        reading.keep_all()
    return hidden[:, -1]


def tree_of_levels(
    loaded: LoadedHead[EagleHead], level: RunLevel, root: Tensor, state: DraftState, size: TreeSize
) -> DraftTree:
    """A dynamic tree, level by level; for the other arguments see `PlainSteps.tree`.

    Args:
        level: function that runs one level.
    """
    target_ids = loaded.target_ids
    logits, fed_back = loaded.head.read(root[:, None])

    def expand(frontier: Frontier) -> Tensor:
        nonlocal fed_back
        tokens = frontier.forest.token_ids[:, frontier.num_cached :]
        logits, fed_back = level(tokens, parent_states(fed_back, frontier.previous_index), frontier.forest.plan)
        return state.child_scores(logits, frontier.depth, target_ids)

    return grow_tree(
        state.root_ids,
        state.child_scores(logits, 0, target_ids)[:, 0],
        expand,
        depth=size.depth,
        top_k=size.width,
        max_nodes=size.max_nodes,
        token_ids=target_ids,
        goes_on=state.goes_on,
    )


def parent_states(states: Float[Tensor, "B P Hd"], index: Int[Tensor, "B F"]) -> Float[Tensor, "B F Hd"]:
    """`states[b, index[b, f]]`."""
    return states.gather(1, index.to(states.device)[..., None].expand(-1, -1, states.shape[-1]))


# Levels of compiled trees; the compiler unrolls them.
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
    assert isinstance(tree.parents, Tensor)
    assert tree.values is not None
    return tree.token_ids, tree.parents, tree.values


class _Levels:
    """The levels of `eagle_tree`, which has the same arguments."""

    def __init__(
        self, head: EagleHead, layers: Sequence[tuple[Tensor, Tensor]], inputs: dict[str, Tensor], warpers: Warpers
    ):
        self._head, self._layers, self._inputs, self._warpers = head, layers, inputs, warpers

    def scores(self, hidden: Tensor, depth: int) -> Tensor:
        """Scores of the children of nodes at `depth` [B, N, C]; keeps the states that these take."""
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


class CompiledSteps(CompiledForwards):
    """The same forwards with fixed shapes, compiled; they have the options' depth and width, or the next bucket."""

    _plain: PlainSteps
    _options: EagleOptions

    def entries(self, token_ids: Tensor, states: Tensor) -> Tensor:
        count = token_ids.shape[1]
        positions, masks = self._reading.next_place(count)
        plain = partial(self._plain.entries, token_ids, states)
        inputs, width = (states, token_ids, positions), self._options.depth + 1
        return self.append(eagle_entries, width, inputs, masks, plain)[:, :count]

    def level(self, token_ids: Tensor, states: Tensor, plan: TreePlan) -> tuple[Tensor, Tensor]:
        count = token_ids.shape[1]
        positions, masks = self._reading.node_place(plan, count)
        plain = partial(self._plain.level, token_ids, states, plan)
        inputs = states, token_ids, positions
        width = self._options.depth - 1 if self._head.spec.parallel else self._options.width(samples=True)
        logits, fed_back = self.append(eagle_level, width, inputs, masks, plain)
        return logits[:, :count], fed_back[:, :count]

    def tree(self, root: Tensor, state: DraftState, size: TreeSize) -> DraftTree:
        """A dynamic tree in one graph; for heads with windows, one graph a level."""
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
        """Keys of the graphs that can grow a tree of this size, the least deep first."""
        deepest = self._options.depth
        form = self._head.dtype, *form_of(state)

        def key_of(levels: int) -> tuple[Any, ...]:
            shape = levels, size.width, size.max_nodes
            return batch_size, capacity_for(self.end + self._num_run(levels, size.width)), shape, *form

        return [key_of(min(levels, deepest)) for levels in (*_DEPTHS, deepest) if levels >= size.depth]

    def _num_run(self, levels: int, width: int) -> int:
        """Number of nodes that are run for a tree; those of the deepest level are not."""
        return max(levels - 1, 1) * min(width, self._head.spec.draft_vocab_size)

    def _tree_arguments(self, key: tuple[Any, ...], root: Tensor, state: DraftState, depth: int) -> tuple[Any, ...]:
        """The arguments of `eagle_tree`, its inputs in buffers."""
        (batch_size, capacity, shape), head = key[:3], self._head
        (levels, width, _), end = shape, self.end
        inputs = {
            "root": root,
            "root_ids": to_device(state.root_ids, head.device),
            "starts": self._reading.positions_at(torch.zeros(1, 1, dtype=torch.long)),
            "limit": to_device([depth], head.device),
            "slots": torch.arange(end, end + self._num_run(levels, width), device=head.device),
            "mask": self.committed_mask(batch_size, capacity),
        }
        log_noise = state.log_noise(range(levels), head.spec.draft_vocab_size, self._loaded.target_ids)
        if log_noise is not None:
            inputs["log_noise"] = log_noise.to(head.device)
        layers, buffers = self.place(batch_size, capacity)
        inputs = {name: buffers.filled((f"tree {name}", levels), each) for name, each in inputs.items()}
        if self._loaded.target_ids is not None:
            inputs["target_ids"] = self._loaded.target_ids
        return head, layers, inputs, tuple(state.warpers), *shape


Steps = PlainSteps | CompiledSteps
