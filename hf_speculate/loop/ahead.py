"""Drafting ahead: while the target verifies a draft, the drafter makes the next one from the most likely outcome.

It assumes that the draft's path of highest value is accepted. The first level of the new draft guesses the token that
the target chooses after that path. If the round ends that way, with one of these tokens, the subtree below the token is
the next draft; otherwise the draft is dropped. The outcome depends on the text, never on how long anything takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..drafting import Drafting, DraftState, Pending
from ..policy import Budget
from ..stats import SpeculationStats
from ..tree import DraftTree
from ..verification import Noise


class Ahead:
    """Drafting ahead in one request of one row.

    Args:
        drafting: drafter at work.
        noise: noise of a request that samples; None if it is greedy.
        stats: counters of drafts made ahead.

    Attributes:
        was_taken: whether the last draft from `take` was made ahead.
    """

    def __init__(self, drafting: Drafting, noise: Noise | None, stats: SpeculationStats):
        self._drafting, self._noise, self._stats = drafting, noise, stats
        self._pending: Pending | None = None
        self._state: DraftState | None = None
        self._ready: DraftTree | None = None
        self.was_taken = False

    def begin(self, tree: DraftTree, budget: Budget, state: DraftState) -> None:
        """Begins the draft for the round after that of `tree`.

        Args:
            budget: budget of the round of `tree`, as the next one's is not known yet.
            state: state before the round of `tree`. Its `max_depth` is the number of tokens that may be emitted from
                its root on.
        """
        row = tree.host.rows()[0]
        path = [row.token_ids[node] for node in row.best_path()]
        max_depth = state.max_depth - len(path) + 1
        if budget.max_depth is not None:
            max_depth = min(max_depth, budget.max_depth + 1)
        if max_depth < 2:  # nothing could be drafted below the guessed token
            return
        num_emitted = state.num_emitted[0] + len(path) - 1
        root = torch.tensor(path[-1:], dtype=torch.long, device="cpu")
        self._state = replace(state, root_ids=root, num_emitted=(num_emitted,), max_depth=max_depth)
        self._pending = self._drafting.ahead(self._state, path[1:])

    def resolve(self, emitted: Sequence[int], *, is_over: bool) -> float:
        """Compares the guess with the outcome; returns the seconds spent waiting for the drafter.

        Args:
            emitted: token ids that the round emitted.
            is_over: whether this was the last round.
        """
        pending, self._pending = self._pending, None
        if pending is None or self._state is None:
            return 0.0
        was_disturbed = self._state.samples and self._noise is not None and self._noise.was_disturbed
        if is_over or was_disturbed or not emitted or list(emitted[:-1]) != list(pending.path):
            pending.cancel()
        else:
            self._ready = self._below(self._drafting.made_ahead(pending), emitted[-1])
        self._stats.count_ahead(pending.seconds, pending.waited, was_right=self._ready is not None)
        return pending.waited

    def take(self) -> DraftTree | None:
        """The draft made for the coming round, or None. It can be taken once."""
        ready, self._ready = self._ready, None
        self.was_taken = ready is not None
        return ready

    def _below(self, tree: DraftTree, token: int) -> DraftTree | None:
        child = tree.host.child(0, 0, token)
        if child is None or self._state is None:
            return None
        row = tree.host.rows()[0].below(child)
        if len(row.token_ids) == 1:
            return None
        return self._drafting.as_scored(DraftTree.from_rows([row]), self._state)
