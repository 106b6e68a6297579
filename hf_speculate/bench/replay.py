"""Adaptive runs again, with the same trees: what was drafted depends on the clock, so it has to be written down.

The one module of benchmarks that knows how it is decided how much to draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ..speculator import Speculator
from ..tuning import NOTHING, Budget, Experience, Tuner


Budgets = Sequence[Budget]


class RecordedExperience(Experience):
    """An experience that notes the budgets of the last request.

    Attributes:
        budgets: one a round.
    """

    def __init__(self, inner: Experience):
        self._inner = inner
        self.budgets: list[Budget] = []

    def tuner(self, *args: Any, **kwargs: Any) -> Any:
        tuner = self._inner.tuner(*args, **kwargs)
        choose, budgets = tuner.choose, []
        self.budgets = budgets

        def recorded(*args: Any, **kwargs: Any) -> Budget:
            budget = choose(*args, **kwargs)
            budgets.append(budget)
            return budget

        tuner.choose = recorded  # type: ignore[method-assign]
        return tuner

    def learn(self, target: PreTrainedModel, tuner: Tuner, adapters: str = "") -> None:
        self._inner.learn(target, tuner, adapters)


class _ReplayedExperience(Experience):
    """Gives every request the same budgets and learns nothing."""

    def __init__(self, budgets: Budgets):
        self._budgets = budgets

    def tuner(self, *args: Any, **kwargs: Any) -> Any:
        return _ReplayedTuner(self._budgets)

    def learn(self, target: PreTrainedModel, tuner: Tuner, adapters: str = "") -> None:
        pass


class _ReplayedTuner:
    def __init__(self, budgets: Budgets):
        self._coming = iter(budgets)

    def choose(self, *args: Any, **kwargs: Any) -> Budget:
        return next(self._coming, NOTHING)

    def record(self, *args: Any, **kwargs: Any) -> None:
        pass

    def leave(self, num_rows: int) -> None:
        pass


def record_budgets(speculator: Speculator) -> None:
    """Has an adaptive speculator note the budgets of its requests from now on."""
    if speculator.experience is not None and not isinstance(speculator.experience, RecordedExperience):
        speculator.experience = RecordedExperience(speculator.experience)


def recorded_budgets(speculator: Any) -> Budgets | None:
    """Those of its last request; None where none were noted."""
    experience = getattr(speculator, "experience", None)
    return experience.budgets if isinstance(experience, RecordedExperience) else None


def replayed(speculator: Speculator, budgets: Budgets | None) -> Speculator:
    """A speculator that drafts as that one did with these budgets (None: it always drafts alike)."""
    again = Speculator(speculator.drafter, adaptive=budgets is not None)
    again.typical = speculator.typical
    if budgets is not None:
        again.experience = _ReplayedExperience(budgets)
    return again
