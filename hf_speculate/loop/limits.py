"""The depth and size that a round's draft may have, and the part of a draft within them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..forward import Scorer
from ..policy import Budget, PolicySession
from ..target import DepthLimit, GenerativeModel, has_length_dependent_rope, takes_position_ids
from ..tree import DraftTree
from ..verification import Sequences, Stopping


_UNBOUNDED = 10**9


class DepthLimits:
    """The depth to which each row may draft.

    Two things limit it: how many tokens can still be emitted, and positions beyond which the target's forward would
    differ from plain decoding.

    Args:
        target: model that verifies.
        stopping, sequences: criteria and texts of the request.
    """

    def __init__(self, target: GenerativeModel, stopping: Stopping, sequences: Sequences):
        self._stopping = stopping
        self._sequences = sequences
        self._of_positions = DepthLimit(target.config)
        self._takes_position_ids = takes_position_ids(target)
        self._counts_padding = has_length_dependent_rope(target.config)

    def __call__(self, scorer: Scorer, root_positions: Sequence[int]) -> list[int]:
        """The limit of every row of the batch. A node at depth d can be emitted only if d tokens and the bonus token
        fit."""
        limit = 0 if scorer.takes_root_only else self._limit(scorer.cache.append_index, root_positions)
        rows, max_length = range(self._sequences.batch_size), self._stopping.max_length
        if max_length is None:
            return [limit for _ in rows]
        return [max(min(limit, max_length - self._sequences.length(row) - 1), 0) for row in rows]

    def within(
        self, budget: Budget, active: Sequence[bool], scorer: Scorer, root_positions: Sequence[int]
    ) -> DraftBounds:
        """The bounds of a round's draft."""
        return DraftBounds(budget, active, self(scorer, root_positions))

    def _limit(self, append_index: int, root_positions: Sequence[int]) -> int:
        limit = None
        if self._of_positions.is_any:
            limit = self._of_positions(self._counts(append_index, root_positions))
        return _UNBOUNDED if limit is None else limit

    def _counts(self, append_index: int, root_positions: Sequence[int]) -> set[int]:
        """The positions that the model may use for the roots. Padding has no position ids, but some models count it."""
        if not self._takes_position_ids:
            return {append_index}
        return {max(root_positions), *((append_index,) if self._counts_padding else ())}


@dataclass(frozen=True)
class DraftBounds:
    """The bounds of one round's draft: the budget, and the tokens that can be emitted.

    Attributes:
        active: whether the round can emit tokens, for each row of the batch.
        limits: depth limit of each row of the batch.
    """

    budget: Budget
    active: Sequence[bool]
    limits: Sequence[int]

    @property
    def allow_draft(self) -> bool:
        return self.budget.max_nodes != 0 and self.max_depth > 0

    @property
    def max_depth(self) -> int:
        """Most levels that are of use to any row."""
        deepest = max(self._of_active, default=0)
        return deepest if self.budget.max_depth is None else min(deepest, self.budget.max_depth)

    def cut(self, tree: DraftTree, policy: PolicySession) -> DraftTree:
        """The part of a tree that is within the bounds and, to the policy, worth scoring."""
        if tree.num_nodes == 1:
            return tree
        if self.budget.max_nodes is not None:
            is_ordered = tree.unread is not None  # its drafter put the best nodes first
            tree = tree.first(self.budget.max_nodes) if is_ordered else tree.best(self.budget.max_nodes)
        tree = policy.cut(tree)
        return tree.pruned(self.limits) if tree.max_depth > min(self._of_active) else tree

    @property
    def _of_active(self) -> list[int]:
        return [limit for limit, is_active in zip(self.limits, self.active, strict=True) if is_active]
