"""Verdicts: one sentence on whether drafting pays, with the likely cause where it does not."""

from __future__ import annotations

from dataclasses import dataclass

from .counters import Counters


_LOW_LENGTH = 1.05  # mean acceptance length: as good as nothing is accepted
_UNTRAINED = 0.15  # accuracy in training below which a head has learned too little; the weakest useful ones show 0.2
_USUAL_FIRST = 0.6  # share accepted at depth 1: published heads of large targets show 0.62 to 0.73 for a chain
# Shares of the accuracy in training that count as usual: on other greedy text, on sampled text.
_LEAST, _LEAST_SAMPLED = 0.8, 0.6
# Rounds, and rounds with a draft, before a verdict that drafting does not pay (a policy soon stops the latter).
_MIN_ROUNDS, _MIN_DRAFTED = 50, 10
_MARGIN = 0.95  # measured times are not as sure as counts


@dataclass(frozen=True)
class HeadRecord:
    """The record of a head's training, from its folder.

    Attributes:
        is_own_target: whether the target is the one of its training, by weights, quantisation and adapters; None where
            there is no record of it.
        accuracy: share of its first draft tokens that were right at the end of training; None without a record.
        length: mean acceptance length at the end of training; None without a record.
        steps: optimizer steps of its training; None without a record.
    """

    is_own_target: bool | None = None
    accuracy: float | None = None
    length: float | None = None
    steps: int | None = None

    @property
    def is_untrained(self) -> bool:
        """Whether the head drafted hardly anything right at the end of its training already."""
        return self.accuracy is not None and self.accuracy < _UNTRAINED

    @property
    def low_first(self) -> float:
        """Share of first draft tokens below which acceptance on greedy text is low."""
        return _USUAL_FIRST if self.accuracy is None else _LEAST * self.accuracy

    @property
    def recorded(self) -> str:
        """Share to compare with, in words: "0.54 in training"."""
        return "trained heads show 0.6 to 0.7" if self.accuracy is None else f"{self.accuracy:.2f} in training"


@dataclass(frozen=True)
class Advice:
    """A drafter's words about its acceptance.

    Attributes:
        good: clause for drafts that pay: "this head fits the target".
        poor: sentences for drafts that do not pay, if nothing else is known: the likely cause, and what to do.
        untried: sentences for calls without a draft; None takes `poor`, of drafters that looked for drafts in vain.
        record: record of a trained head, which has a usual acceptance; None for other drafters.
    """

    good: str = "the drafts pay"
    poor: str = "Another drafter, or other options, may do better."
    untried: str | None = None
    record: HeadRecord | None = None


def of_heads(record: HeadRecord) -> Advice:
    """Advice for drafters that read the target's states."""
    return Advice(
        good="this head fits the target",
        poor="Wrong target, template, adapter or quantisation? Run `hf-speculate check`.",
        untried="",
        record=record,
    )


def verdict(counts: Counters, advice: Advice) -> str:
    """One or two sentences on the counts."""
    length, speedup = counts.mean_acceptance_length, counts.estimated_speedup
    if not counts.calls:
        return "nothing was generated yet."
    if length is None:
        return f"no round had a draft. {advice.poor if advice.untried is None else advice.untried}".rstrip()
    if counts.rounds < _MIN_DRAFTED:
        seen = "1 round" if counts.rounds == 1 else f"{counts.rounds} rounds"
        return f"too early to say: {seen} had a draft."
    if problem := _problem(counts):
        return f"{problem} {_cause(counts, advice)}"
    if speedup is not None and _MARGIN * speedup < 1.0:
        told = "near break-even" if speedup >= _MARGIN else "drafts do not pay here"
        return f"{told}: {speedup:.2f}x with {length:.2f} tokens per drafted round. {_cause(counts, advice)}"
    first = counts.acceptance_rate_by_depth.get(1, 0.0)
    if advice.record and first < advice.record.low_first:
        finding = f"accepts little at depth 1 ({first:.2f}; {advice.record.recorded})"
        return f"it pays, but {finding}. {_cause(counts, advice)}"
    return f"{advice.good}."


def shortfall(counts: Counters, advice: Advice) -> str | None:
    """Warning, once enough rounds were seen; None while all is well or little is known."""
    is_enough = counts.rounds + counts.rounds_without_draft >= _MIN_ROUNDS and counts.rounds >= _MIN_DRAFTED
    problem = _problem(counts, margin=_MARGIN) if is_enough else ""
    return f"{problem} {_cause(counts, advice)}" if problem else None


def _problem(counts: Counters, margin: float = 1.0) -> str:
    """A sentence that drafts do not pay; "" if they do, or too little is known."""
    length, needed = counts.mean_acceptance_length, counts.break_even_length
    if length is None or (counts.estimated_speedup or 0.0) >= 1.0:
        return ""
    if needed is not None and length < margin * needed:
        finding = f"{length:.2f} tokens per drafted round where {needed:.2f} would make up for their cost"
        return f"drafts do not pay here: {finding}."
    return f"as good as nothing is accepted: {length:.2f} tokens per drafted round." if length < _LOW_LENGTH else ""


def _cause(counts: Counters, advice: Advice) -> str:
    """The likely cause of a small gain, and what to do."""
    record, first = advice.record, counts.acceptance_rate_by_depth.get(1, 0.0)
    if record is None:
        return advice.poor
    if first >= record.low_first:
        return (
            "The head drafts as well as it should, but a token of this target is so cheap here that drafts gain "
            "little, or other work runs on this machine. `hf-speculate doctor` measures what pays."
        )
    if 2 * counts.sampled_calls > counts.calls and first >= _LEAST_SAMPLED * (record.accuracy or _USUAL_FIRST):
        return "Sampled text accepts less than greedy text; a lower temperature accepts more."
    if record.is_own_target is None:
        return advice.poor
    if record.is_own_target:
        return (
            "The target is the one that the head was trained for. Is this text of another kind than its training "
            "texts? `hf-speculate check --prompts FILE` measures yours."
        )
    return "The head was trained for other weights, another quantisation or other adapters. Train one for this target."
