"""Looking ahead: while the target verifies a draft, the drafter makes the next one on the likeliest guess.

The guess is the path of the draft whose nodes are worth most; what the target chooses behind it is guessed by the
drafter, in the first level of what it drafts. Where the verdict is that path and one of these tokens, what hangs on it
is the next draft; else it is thrown away. Which of the two happens depends on the text, never on how long things take.
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
        drafting: the drafter at work.
        noise: of a request that samples.
        stats: count what became of it.

    Attributes:
        was_taken: whether the last draft that was asked for had been made ahead.
    """

    def __init__(self, drafting: Drafting, noise: Noise | None, stats: SpeculationStats):
        self._drafting, self._noise, self._stats = drafting, noise, stats
        self._pending: Pending | None = None
        self._state: DraftState | None = None
        self._ready: DraftTree | None = None
        self.was_taken = False

    def begin(self, tree: DraftTree, budget: Budget, state: DraftState) -> None:
        """Starts on the round after that of `tree`.

        Args:
            budget: of the round; the next one's is not known yet.
            state: as before the round, but for `max_depth`: what may be emitted from its root on.
        """
        row = tree.host.rows()[0]
        path = [row.token_ids[node] for node in row.best_path()]
        max_depth = state.max_depth - len(path) + 1
        if budget.max_depth is not None:
            max_depth = min(max_depth, budget.max_depth + 1)
        if max_depth < 2:  # what hangs on the token behind the path
            return
        num_emitted = state.num_emitted[0] + len(path) - 1
        root = torch.tensor(path[-1:])
        self._state = replace(state, root_ids=root, num_emitted=(num_emitted,), max_depth=max_depth)
        self._pending = self._drafting.ahead(self._state, path[1:])

    def settle(self, emitted: Sequence[int], *, is_over: bool) -> float:
        """The verdict is there; returns the seconds that were waited for the drafter.

        Args:
            emitted: tokens of the round.
            is_over: no other round follows.
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
        """The draft that was made for the coming round; None if there is none. It is wanted now or never."""
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
