"""Policies that measure nothing: a constant budget, or a recorded list of budgets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import OptionError
from .contract import NOTHING, Budget, DraftPolicy, PolicyRequest, PolicySession, Situation


class Fixed(DraftPolicy):
    """Drafts in every round what the drafter's options give, up to a constant limit.

    Args:
        max_nodes: most draft nodes a row; None sets no limit.
        max_depth: most levels below the root; None sets no limit.
    """

    def __init__(self, max_nodes: int | None = None, max_depth: int | None = None):
        for name, value in (("max_nodes", max_nodes), ("max_depth", max_depth)):
            if value is not None and value < 0:
                raise OptionError(f"{name} must be None or at least 0, got {value}.")
        self.budget = Budget(max_nodes, max_depth)

    def start(self, request: PolicyRequest) -> PolicySession:
        return _Listed(_forever(self.budget))

    def __repr__(self) -> str:
        return f"Fixed(max_nodes={self.budget.max_nodes}, max_depth={self.budget.max_depth})"


class Replay(DraftPolicy):
    """Repeats a recorded list of budgets in every request, then drafts nothing.

    This repeats an adaptive run with the same trees.

    Args:
        budgets: one budget for each round of a request.
    """

    is_adaptive = True  # the recorded run was adaptive

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
