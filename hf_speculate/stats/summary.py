"""The summary of statistics, drawn as text and as HTML from the same lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from .counters import Counters


_BAR = 24  # characters of a bar that stands for 1.0
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class Summary:
    """What is shown.

    Attributes:
        title: one line.
        lines: (name, value).
        bars: (depth, share of the rounds with a draft that were accepted to it).
        verdict: in words.
    """

    title: str
    lines: Sequence[tuple[str, str]]
    bars: Sequence[tuple[int, float]]
    verdict: str

    @classmethod
    def of(cls, counts: Counters, drafter: str, verdict: str) -> Summary:
        calls = f"{counts.calls} call{'' if counts.calls == 1 else 's'}"
        tokens = counts.prefill_tokens + counts.emitted_tokens
        speed = f", {tokens / counts.total_seconds:.1f} tokens/s" if counts.total_seconds else ""
        title = f"{drafter or 'speculation'}: {calls}, {tokens} tokens{speed}"
        return cls(title, list(_lines(counts)), list(counts.shares_by_depth.items()), verdict)

    def text(self) -> str:
        """For a terminal."""
        bars = [("accepted to depth" if i == 0 else "", bar) for i, bar in enumerate(map(_bar_text, self.bars))]
        pairs = [*self.lines[:1], *bars, *self.lines[1:], ("verdict", self.verdict)]
        return "\n".join([self.title, *(f"  {name:<18} {value}" for name, value in pairs)])

    def html(self) -> str:
        """For a notebook."""
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self.lines)
        bars = "".join(map(_bar_html, self.bars))
        chart = f"<tr><th>accepted to depth</th><td>{bars}</td></tr>" if bars else ""
        end = f"<tr><th>verdict</th><td>{escape(self.verdict)}</td></tr>"
        return f"<table><caption>{escape(self.title)}</caption>{rows}{chart}{end}</table>"


def _lines(counts: Counters) -> Iterator[tuple[str, str]]:
    length = counts.mean_acceptance_length
    number = counts.rounds + counts.rounds_without_draft
    overall = f"{counts.tokens_per_round:.2f} over all {number}" if number else "no rounds"
    drafted = "none had a draft" if length is None else f"{length:.2f} in the {counts.rounds} with a draft"
    yield "tokens a round", f"{overall}; {drafted}"
    if counts.total_seconds:
        yield "time", _times(counts)
        yield "speed-up", _speedup(counts)
    if counts.drafts_ahead:
        yield "drafts ahead", _ahead(counts)
    for reason, number in counts.fallbacks.most_common():
        yield "fallback", f"{reason} ({number}x)"


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


def _bar_text(bar: tuple[int, float]) -> str:
    depth, share = bar
    whole, part = divmod(round(share * _BAR * 8), 8)
    drawn = "█" * whole + (_EIGHTHS[part] if part else "")
    return f"{depth:>2} {drawn:<{_BAR}} {share:.2f}"


def _bar_html(bar: tuple[int, float]) -> str:
    depth, share = bar
    drawn = f'<span style="display:inline-block;background:#4c9a6a;height:0.8em;width:{10 * share:.1f}em"></span>'
    return f"<div>{depth} {drawn} {share:.2f}</div>"
