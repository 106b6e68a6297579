"""The policy that measures nothing: a constant budget."""

from __future__ import annotations

from ..errors import OptionError
from .contract import Budget, DraftPolicy, PolicyRequest, PolicySession, Situation


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
        return _Constant(self.budget)

    def __repr__(self) -> str:
        return f"Fixed(max_nodes={self.budget.max_nodes}, max_depth={self.budget.max_depth})"


class _Constant(PolicySession):
    def __init__(self, budget: Budget):
        self._budget = budget

    def choose(self, situation: Situation) -> Budget:
        return self._budget
