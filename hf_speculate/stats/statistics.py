"""The statistics that users see: the counters, with a summary for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Any

from .advice import Advice, shortfall, verdict
from .counters import Counters
from .runners import dearest_fallback, slower_runner


_BAR = 24  # characters of a bar that stands for 1.0
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(repr=False)
class SpeculationStats(Counters):
    """Statistics of speculation in one call or, cumulative, of a speculator. Times are seconds on the host's clock.

    `print(stats)` and notebooks show `summary()`; `to_dict()` has everything.

    Attributes:
        drafter: name of the drafter.
        advice: the drafter's advice about its acceptance.
    """

    drafter: str = field(default="", compare=False)
    advice: Advice = field(default_factory=Advice, compare=False)

    def reset(self) -> None:
        """Sets every counter to zero."""
        self.__init__(drafter=self.drafter, advice=self.advice)

    @property
    def verdict(self) -> str:
        """Sentence on whether drafting pays, with the likely cause where it does not."""
        return verdict(self, self.advice)

    @property
    def shortfall(self) -> str | None:
        """Warning for the user; None while all is well or too little is known."""
        return shortfall(self, self.advice)

    @property
    def dearest_fallback(self) -> str:
        """Sentence on the fallback that costs the most time, such as a hook that keeps the target from its fastest
        runner; "" without one."""
        return dearest_fallback(self)

    def to_dict(self) -> dict[str, Any]:
        """All counters and figures as JSON-serialisable values, with the verdict."""
        more = {"drafter": self.drafter, "verdict": self.verdict, "dearest_fallback": self.dearest_fallback}
        return super().to_dict() | more

    def summary(self) -> str:
        """Text of several lines: tokens per round, acceptance by depth and by drafter, shares of the time, the speed-up
        and its source, runners, fallbacks with their reasons, and the verdict."""
        first, *others = _lines(self)
        bars = [("", _bar_text(depth, share)) for depth, share in self.shares_by_depth.items()]
        bars[:1] = [("accepted to depth", bar) for _, bar in bars[:1]]
        pairs = [first, *bars, *others, ("verdict", self.verdict)]
        return "\n".join([_title(self), *(f"  {name:<18} {value}" for name, value in pairs)])

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        length = self.mean_acceptance_length
        shown = "no rounds with a draft" if length is None else f"{length:.2f} tokens per drafted round"
        return f"SpeculationStats({self.drafter or 'no drafter'}, calls: {self.calls}, {shown})"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in _lines(self))
        bars = "".join(_bar_html(depth, share) for depth, share in self.shares_by_depth.items())
        chart = f"<tr><th>accepted to depth</th><td>{bars}</td></tr>" if bars else ""
        end = f"<tr><th>verdict</th><td>{escape(self.verdict)}</td></tr>"
        return f"<table><caption>{escape(_title(self))}</caption>{rows}{chart}{end}</table>"


def _title(stats: SpeculationStats) -> str:
    calls = f"{stats.calls} call{'' if stats.calls == 1 else 's'}"
    tokens = stats.prefill_tokens + stats.emitted_tokens
    speed = f", {tokens / stats.total_seconds:.1f} tokens/s" if stats.total_seconds else ""
    return f"{stats.drafter or 'speculation'}: {calls}, {tokens} tokens{speed}"


def _lines(counts: Counters) -> Iterator[tuple[str, str]]:
    """Names and values of the lines between title and verdict."""
    length = counts.mean_acceptance_length
    number = counts.rounds + counts.rounds_without_draft
    overall = f"{counts.tokens_per_round:.2f} over all {number}" if number else "no rounds"
    drafted = "none had a draft" if length is None else f"{length:.2f} in the {counts.rounds} with a draft"
    yield "tokens per round", f"{overall}; {drafted}"
    if total := counts.accepted_by_source.total():
        shares = (f"{name} {number / total:.0%}" for name, number in counts.accepted_by_source.most_common())
        yield "accepted from", ", ".join(shares)
    if counts.total_seconds:
        yield "time", _times(counts)
        yield "speed-up", _speedup(counts)
    if counts.drafts_ahead:
        yield "drafts ahead", _ahead(counts)
    if counts.attention:
        yield "attention", "; ".join(counts.attention)
    if counts.recorded_bytes:
        yield "recordings", f"{max(counts.recorded_bytes) / 1e6:.0f} MB with their buffers"
    if counts.target_runners:
        yield "forwards", _runners(counts)
    for reason, number in counts.fallbacks.most_common():
        yield "fallback", f"{reason} ({number}x)"
    if slower := slower_runner(counts):
        yield "costs the most", slower


def _runners(counts: Counters) -> str:
    """Forwards of the target, and of the draft if it has a model, by runner."""
    of_models = {"target": counts.target_runners, "draft": counts.draft_runners}
    shown = (
        f"{name} {', '.join(f'{runner} ({number})' for runner, number in runners.most_common())}"
        for name, runners in of_models.items()
        if runners
    )
    return "; ".join(shown)


def _times(counts: Counters) -> str:
    parts = {
        "target": counts.target_seconds,
        "drafter": counts.drafter_seconds,
        "prompt": counts.prefill_seconds + counts.drafter_prefill_seconds,
        "rest": counts.rest_seconds,
    }
    return ", ".join(f"{name} {seconds / counts.total_seconds:.0%}" for name, seconds in parts.items())


def _speedup(counts: Counters) -> str:
    speedup, plain = counts.estimated_speedup, counts.plain_round_seconds
    number = len(counts.round_seconds_without_draft)
    if speedup is None or plain is None:
        few = f"only {number}" if number else "no"
        rounds = "round" if number == 1 else "rounds"
        return f"not known: {few} {rounds} ran without a draft (`hf-speculate generate --compare` measures it)"
    source = f"estimated from {number} rounds without a draft ({1000 * plain:.1f} ms)"
    return f"about {speedup:.2f}x after the prompt, {source}"


def _ahead(counts: Counters) -> str:
    share = counts.drafts_ahead_taken / counts.drafts_ahead
    return (
        f"{share:.0%} of {counts.drafts_ahead} were right: {counts.ahead_seconds_saved:.2f} s of drafting hidden, "
        f"{counts.ahead_seconds_wasted:.2f} s in vain"
    )


def _bar_text(depth: int, share: float) -> str:
    whole, part = divmod(round(share * _BAR * 8), 8)
    drawn = "█" * whole + (_EIGHTHS[part] if part else "")
    return f"{depth:>2} {drawn:<{_BAR}} {share:.2f}"


def _bar_html(depth: int, share: float) -> str:
    drawn = f'<span style="display:inline-block;background:#4c9a6a;height:0.8em;width:{10 * share:.1f}em"></span>'
    return f"<div>{depth} {drawn} {share:.2f}</div>"
