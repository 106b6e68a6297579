"""The drafts of one request: how much a round may draft, and what the drafter returns within that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cache import TreeCache
from ..drafting import Deepening, Drafting, DraftState
from ..models import GenerativeModel
from ..policy import NOTHING, Budget, PolicySession, Situation
from ..scoring import DepthLimit, Scorer, has_length_dependent_rope, takes_position_ids
from ..tree import DraftTree
from ..verification import Sampler, Sequences, Stopping
from .ahead import Ahead
from .rows import Rows
from .target import Target


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


@dataclass(kw_only=True)
class Drafts:
    """The drafting side of one request.

    Attributes:
        driver: drafter at work.
        policy: policy that chooses how much every round drafts.
        limits: limits of the depth of each row.
        ahead: drafts the next round while this one is verified; None if that is off.
        depth: depth of the last draft before it was cut; 0 without a draft.
    """

    driver: Drafting
    policy: PolicySession
    limits: DepthLimits
    ahead: Ahead | None = None
    depth: int = field(default=0, init=False)

    def choose(self, rows: Rows, cache: TreeCache) -> Budget:
        """The budget of the round."""
        taking_part = [row for row, takes_part in enumerate(rows.active) if takes_part]
        situation = Situation(taking_part, len(cache.rows), cache.append_index)
        return self.policy.choose(situation) if taking_part else NOTHING

    def tree(self, budget: Budget, rows: Rows, target: Target, sampler: Sampler) -> DraftTree:
        """The drafter's tree within the budget, cut to the tokens that can be emitted."""
        active, limits = rows.active, self.limits(target.scorer, target.root_positions(rows.sequences))
        tree = None if self.ahead is None else self.ahead.take()
        taking_part = [limit for limit, takes_part in zip(limits, active, strict=True) if takes_part]
        max_depth = max(taking_part, default=0)
        if budget.max_depth is not None:
            max_depth = min(max_depth, budget.max_depth)
        self.depth = 0
        if budget.max_nodes == 0 or max_depth <= 0:
            return DraftTree.root_only(rows.sequences.last_tokens)
        if tree is None:
            tree = self.driver.draft(self._state(rows, target, sampler, max_depth, self.policy.deepening()))
        if tree.num_nodes == 1:
            return tree
        self.depth = tree.max_depth
        if budget.max_nodes is not None:
            is_unread = tree.unread is not None  # its drafter put the best nodes first
            tree = tree.first(budget.max_nodes) if is_unread else tree.best(budget.max_nodes)
        tree = self.policy.cut(tree)
        return tree.pruned(limits) if tree.max_depth > min(taking_part) else tree

    def begin_ahead(self, tree: DraftTree, budget: Budget, rows: Rows, target: Target, sampler: Sampler) -> None:
        """Lets the drafter begin the draft for the round after that of `tree`."""
        assert self.ahead is not None
        (limit,) = self.limits(target.scorer, target.root_positions(rows.sequences))
        self.ahead.begin(tree, budget, self._state(rows, target, sampler, limit, self.policy.deepening_ahead()))

    @property
    def was_made_ahead(self) -> bool:
        """Whether the last draft was made ahead."""
        return self.ahead is not None and self.ahead.was_taken

    def _state(
        self, rows: Rows, target: Target, sampler: Sampler, max_depth: int, deepening: Deepening | None
    ) -> DraftState:
        is_chain = target.scorer.shape == "chain"
        place = sampler, rows.sequences, rows.active, max_depth
        num_nodes = self.policy.num_nodes()
        return self.driver.state(*place, chains_only=is_chain, deepening=deepening, num_nodes=num_nodes)
