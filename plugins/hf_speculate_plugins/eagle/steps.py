"""What a session has its head do: read what was committed, run a level of a tree, grow a dynamic tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.drafting import DraftState
from hf_speculate.tree import DraftTree, TreePlan

from ..heads import CachedAttention, Reading
from ..trees import Frontier, grow_tree
from .checkpoint import LoadedHead
from .head import EagleHead
from .options import TreeSize


if TYPE_CHECKING:
    from .native import NativeForward


Pending = tuple[Tensor, Sequence[Tensor], list[int]]
"""What was committed and is yet to be read: tokens [B, J], the target's features [B, J, Ht], lengths."""

RunLevel = Callable[[Tensor, Tensor, TreePlan], tuple[Tensor, Tensor]]
"""See `Steps.level`."""

# Entries of a prompt that are run at once: a mask of the whole prompt would be quadratic in its length.
_CHUNK = 1024


@runtime_checkable
class Steps(Protocol):
    """Forwards of a head behind one reading. They append entries; what stays is said to the reading."""

    def entries(self, token_ids: Int[Tensor, "B J"], states: Float[Tensor, "B J Hd"]) -> Float[Tensor, "B J Hd"]:
        """Runs what a round committed, with the states of its features; the states before the final norm."""
        ...

    def level(
        self, token_ids: Int[Tensor, "B F"], states: Float[Tensor, "B F Hd"], plan: TreePlan
    ) -> tuple[Float[Tensor, "B F Vd"], Float[Tensor, "B F Hd"]]:
        """Runs the last F nodes of a forest whose earlier nodes were run since the last `Reading.drop`.

        Args:
            plan: structure of the forest, its roots being children of the entry committed last.
        Returns:
            `EagleHead.read` of these nodes.
        """
        ...

    def tree(self, root: Float[Tensor, "B Hd"], state: DraftState, size: TreeSize) -> DraftTree:
        """A dynamic tree.

        Args:
            root: states of the entry committed last.
        """
        ...

    def tree_behind(
        self, pending: Pending, state: DraftState, size: TreeSize
    ) -> tuple[DraftTree, Float[Tensor, "B Hd"]] | None:
        """Commits what is pending and draws a dynamic tree behind it; with the states of the entry committed last.

        None, and nothing done, where one is to be done after the other.
        """
        ...


class PlainSteps:
    """`Steps` as they are.

    Args:
        loaded: the head.
        reading: what it has read.
        native: computes what it can of the head.
    """

    def __init__(self, loaded: LoadedHead, reading: Reading, native: NativeForward | None = None):
        self._loaded, self._reading, self._native = loaded, reading, native

    @torch.no_grad()
    def entries(self, token_ids: Tensor, states: Tensor) -> Tensor:
        positions, masks = self._reading.next_place(token_ids.shape[1])
        return self._run(token_ids, states, positions, masks)

    @torch.no_grad()
    def level(self, token_ids: Tensor, states: Tensor, plan: TreePlan) -> tuple[Tensor, Tensor]:
        positions, masks = self._reading.node_place(plan, token_ids.shape[1])
        return self._loaded.head.read(self._run(token_ids, states, positions, masks))

    def tree(self, root: Tensor, state: DraftState, size: TreeSize) -> DraftTree:
        return tree_of_levels(self._loaded, self.level, root, state, size)

    def tree_behind(self, pending: Pending, state: DraftState, size: TreeSize) -> tuple[DraftTree, Tensor] | None:
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
    native: NativeForward | None = None,
) -> Float[Tensor, "B Hd"]:
    """Commits the prompt's entries, padding included; returns the states of the last one. Prompts have many lengths:
    this is never compiled.

    Args:
        native: computes short prompts, where it can.
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


def tree_of_levels(loaded: LoadedHead, level: RunLevel, root: Tensor, state: DraftState, size: TreeSize) -> DraftTree:
    """A dynamic tree, level by level; arguments as of `Steps.tree`.

    Args:
        level: runs one, see `Steps.level`.
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
