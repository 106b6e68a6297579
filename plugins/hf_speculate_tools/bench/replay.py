"""Adaptive runs again, with the same trees: the clock decides what an adaptive policy drafts, so its budgets are noted.

Nothing else in the benchmarks knows how a policy chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hf_speculate.drafting import EarlyStopping
from hf_speculate.policy import NOTHING, Budget, DraftPolicy, PolicyRequest, PolicySession, Situation
from hf_speculate.speculator import Speculator
from hf_speculate.tree import DraftTree, Round


Budgets = Sequence[Budget]


class RecordedPolicy(DraftPolicy):
    """A policy that notes the budgets of its last request.

    Attributes:
        budgets: nodes and depth of each round, as drafted and scored.
    """

    is_adaptive = True

    def __init__(self, inner: DraftPolicy):
        self._inner = inner
        self.budgets: list[Budget] = []

    def start(self, request: PolicyRequest) -> PolicySession:
        self.budgets = []
        return _Noting(self._inner.start(request), self.budgets)


class _Noting(PolicySession):
    def __init__(self, inner: PolicySession, budgets: list[Budget]):
        self._inner = inner
        self._budgets = budgets

    def choose(self, situation: Situation) -> Budget:
        self._budgets.append(self._inner.choose(situation))
        return self._budgets[-1]

    def early_stopping(self) -> EarlyStopping | None:
        return self._inner.early_stopping()

    def cut(self, tree: DraftTree) -> DraftTree:
        cut = self._inner.cut(tree)
        self._budgets[-1] = Budget(cut.num_nodes - 1, tree.max_depth)
        return cut

    def learn(self, round: Round) -> None:
        self._inner.learn(round)

    def close(self) -> None:
        self._inner.close()


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


def record_budgets(speculator: Speculator) -> None:
    """Makes an adaptive speculator note the budgets of its requests from now on."""
    if speculator.policy.is_adaptive and not isinstance(speculator.policy, RecordedPolicy):
        speculator.policy = RecordedPolicy(speculator.policy)


def recorded_budgets(speculator: Any) -> Budgets | None:
    """Budgets of a speculator's last request; None where none were noted."""
    policy = getattr(speculator, "policy", None)
    return policy.budgets if isinstance(policy, RecordedPolicy) else None


def replayed(speculator: Speculator, budgets: Budgets | None) -> Speculator:
    """A speculator that drafts as `speculator` did with these budgets (None: with fixed trees)."""
    policy = {"adaptive": False} if budgets is None else {"policy": Replay(budgets)}
    again = Speculator(speculator.drafter, **policy)
    again.typical = speculator.typical
    return again
