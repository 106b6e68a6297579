"""The runners of forwards, and the reasons why faster ones did not run them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .counters import Counters


NATIVE, GRAPH, EAGER = "native", "graph", "eager"
"""Runners: the kernel for packed weights, a captured or compiled graph, the modules."""

_STATES = ("native", "recorded", "compiled")  # what forwards are said to be with a faster runner
_DRAFT = "draft "  # words before reasons that are about the draft


@dataclass(frozen=True)
class RunnerRecord:
    """The runners of one model's forwards in one request: the target's, or those of a drafter.

    Attributes:
        counts: runner -> number of forwards, or of drafts that are one call.
        fallbacks: reasons why something ran otherwise than a user may expect, each counted once per request.
        subject: words before each reason, for a model that is not the target.
    """

    counts: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    subject: str = ""

    @classmethod
    def of_target(cls, stats: Counters) -> RunnerRecord:
        """The target's record in the statistics of a call."""
        return cls(stats.target_runners, stats.fallbacks)

    @classmethod
    def of_draft(cls, stats: Counters) -> RunnerRecord:
        """The drafter's record in the statistics of a call."""
        return cls(stats.draft_runners, stats.fallbacks, _DRAFT)

    def ran(self, runner: str) -> None:
        """Counts a forward."""
        self.counts[runner] += 1

    def refuse(self, state: str, reason: str) -> None:
        """Notes that a faster runner did not run a forward.

        Args:
            state: adjective for a forward of the faster runner: "native", "recorded" or "compiled".
            reason: noun phrase such as "a hook on a layer".
        """
        self.fallbacks[f"{self.subject}not {state}: {reason}"] = 1


def dearest_fallback(counts: Counters) -> str:
    """The sentence on the fallback that costs the most time; "" without one."""
    return slower_runner(counts) or next((f"{reason}." for reason, _ in counts.fallbacks.most_common()), "")


def slower_runner(counts: Counters) -> str:
    """The sentence on forwards that a faster runner did not run; "" without any.

    Most of a round is the target's forward. So a slower runner of the target comes first, and one of the draft second.
    """
    for subject, whose, runners in (("", "target", counts.target_runners), (_DRAFT, "draft", counts.draft_runners)):
        reasons = [reason for reason, _ in counts.fallbacks.most_common() if _is_of_runner(reason, subject)]
        if runners[EAGER] and reasons:
            eager = f"{runners[EAGER]} of {runners.total()} forwards of the {whose} were eager"
            first = reasons[0].removeprefix(subject)
            return f"{eager}, {first}." if len(reasons) == 1 else f"{eager}. The most frequent reason is: {first}."
    return ""


def _is_of_runner(reason: str, subject: str) -> bool:
    return reason.startswith(tuple(f"{subject}not {state}: " for state in _STATES))
