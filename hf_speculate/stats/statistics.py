"""The statistics that users see: the counters, with a summary for terminals and notebooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .advice import Advice, shortfall, verdict
from .counters import Counters
from .summary import Summary


@dataclass(repr=False)
class SpeculationStats(Counters):
    """What speculation did in one call or, cumulative, for a speculator. Times are seconds of wall clock on the host.

    `print(stats)` and notebooks show `summary()`; `to_dict()` has everything.

    Attributes:
        drafter: its name.
        advice: what the drafter has to say of its acceptance.
    """

    drafter: str = field(default="", compare=False)
    advice: Advice = field(default_factory=Advice, compare=False)

    def reset(self) -> None:
        """Sets every counter to zero."""
        self.__init__(drafter=self.drafter, advice=self.advice)

    @property
    def verdict(self) -> str:
        """Whether it pays, and what to look at where it does not."""
        return verdict(self, self.advice)

    @property
    def shortfall(self) -> str | None:
        """What a user should be warned of; None while all is well or too little is known."""
        return shortfall(self, self.advice)

    def summary(self) -> str:
        """Tokens a round, acceptance by depth, shares of the time, the speed-up and how it was got, fallbacks with
        their reasons, and a verdict: a text of several lines."""
        return self._summary().text()

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-serialisable values, derived figures and verdict included."""
        return super().to_dict() | {"drafter": self.drafter, "verdict": self.verdict}

    def _summary(self) -> Summary:
        return Summary.of(self, self.drafter, self.verdict)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        length = self.mean_acceptance_length
        shown = "no rounds with a draft" if length is None else f"{length:.2f} tokens a round"
        return f"SpeculationStats({self.drafter or 'no drafter'}, calls: {self.calls}, {shown})"

    def _repr_html_(self) -> str:
        return self._summary().html()
