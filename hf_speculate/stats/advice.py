"""Does it pay? One sentence on what was counted, and where it does not pay the reason that is likely."""

from __future__ import annotations

from dataclasses import dataclass

from .counters import Counters


_LOW_LENGTH = 1.05  # tokens a round: as good as nothing is accepted
_LOW_FIRST = 0.5  # share accepted at depth 1, below what published heads show (0.62 to 0.73 for a chain)
# Before it is said that something does not pay: rounds, of which so many with a draft (a policy soon stops those).
_MIN_ROUNDS, _MIN_DRAFTED = 50, 10
_MARGIN = 0.95  # measured times are not as sure as counts


@dataclass(frozen=True)
class Advice:
    """What a drafter has to say of its acceptance.

    Attributes:
        good: where it pays, a clause: "this head fits the target".
        poor: where it does not, whole sentences: what is likely, what to do.
        is_trained: whether it was trained for a target, so that its acceptance has a usual size.
    """

    good: str = "the drafts pay"
    poor: str = "Another drafter, or other options, may do better."
    is_trained: bool = False


OF_HEADS = Advice(
    good="this head fits the target",
    poor="Wrong target, template, adapter or quantisation? Run `hf-speculate check`.",
    is_trained=True,
)


def verdict(counts: Counters, advice: Advice) -> str:
    """One sentence or two on all that was counted."""
    length = counts.mean_acceptance_length
    if not counts.calls:
        return "nothing was generated yet."
    if length is None:
        return f"no round had a draft. {advice.poor}"
    if counts.rounds < _MIN_DRAFTED:
        seen = "1 round" if counts.rounds == 1 else f"{counts.rounds} rounds"
        return f"too early to say: {seen} had a draft."
    if problem := _problem(counts):
        return f"{problem} {advice.poor}"
    if (counts.estimated_speedup or 1.0) < 1.0:
        return f"near break-even: {length:.2f} tokens a round, of which the gain is small. {advice.poor}"
    first = counts.acceptance_rate_by_depth.get(1, 0.0)
    if advice.is_trained and first < _LOW_FIRST:
        return f"it pays, but accepts little at depth 1 ({first:.2f}; trained heads show 0.6 to 0.7). {advice.poor}"
    return f"{advice.good}."


def shortfall(counts: Counters, advice: Advice) -> str | None:
    """What to warn of, once enough rounds have been seen; None while all is well or little is known."""
    is_enough = counts.rounds + counts.rounds_without_draft >= _MIN_ROUNDS and counts.rounds >= _MIN_DRAFTED
    problem = _problem(counts, margin=_MARGIN) if is_enough else ""
    return f"{problem} {advice.poor}" if problem else None


def _problem(counts: Counters, margin: float = 1.0) -> str:
    """Why drafts do not pay, "" where they do or nobody knows."""
    length, needed = counts.mean_acceptance_length, counts.break_even_length
    if length is None:
        return ""
    if needed is not None and length < margin * needed:
        return f"drafts do not pay here: {length:.2f} tokens a round where {needed:.2f} would make up for their cost."
    return f"as good as nothing is accepted: {length:.2f} tokens a round." if length < _LOW_LENGTH else ""
