"""Policies that look at no clock: always the same budget, or a list of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .contract import NOTHING, Budget, DraftPolicy, PolicyRequest, PolicySession, Situation


class Fixed(DraftPolicy):
    """Every round drafts alike: what the drafter's options say, at most this.

    Args:
        max_nodes: draft nodes a row; None: no limit.
        max_depth: likewise.
    """

    def __init__(self, max_nodes: int | None = None, max_depth: int | None = None):
        for name, value in (("max_nodes", max_nodes), ("max_depth", max_depth)):
            if value is not None and value < 0:
                raise ValueError(f"{name} must be None or at least 0, got {value}.")
        self.budget = Budget(max_nodes, max_depth)

    def start(self, request: PolicyRequest) -> PolicySession:
        return _Listed(_forever(self.budget))

    def __repr__(self) -> str:
        return f"Fixed(max_nodes={self.budget.max_nodes}, max_depth={self.budget.max_depth})"


class Replay(DraftPolicy):
    """Every request gets these budgets, one a round, and drafts nothing when they are used up: an adaptive run that is
    written down can be run again, with the same trees.

    Args:
        budgets: of the rounds of one request.
    """

    is_adaptive = True  # so was the run that is repeated

    def __init__(self, budgets: Iterable[Budget]):
        self.budgets = tuple(budgets)

    def start(self, request: PolicyRequest) -> PolicySession:
        return _Listed(iter(self.budgets))

    def __repr__(self) -> str:
        return f"Replay({len(self.budgets)} budgets)"


class _Listed(PolicySession):
    def __init__(self, budgets: Iterator[Budget]):
        self._budgets = budgets

    def choose(self, situation: Situation) -> Budget:
        return next(self._budgets, NOTHING)


def _forever(budget: Budget) -> Iterator[Budget]:
    while True:
        yield budget
