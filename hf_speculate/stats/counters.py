"""Counters of rounds, and the figures that follow from them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from statistics import median
from typing import Any

from ..tree import Round


_KEPT = 64  # number of last rounds whose seconds are kept
_FEW = 4  # fewer rounds of a kind may be warm-ups, and show nothing about the others


class Stopwatch:
    """A context that adds the time spent in it to a counter, however it is left. It may be entered many times.

    Args:
        stats, counter: counters of a call, and the name of one of seconds.
        after: function that gets the seconds each time, unless an exception leaves the context.
    """

    def __init__(self, stats: Counters, counter: str, after: Callable[[float], object] | None = None):
        self._stats, self._counter, self._after, self._start = stats, counter, after, 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        seconds = time.perf_counter() - self._start
        setattr(self._stats, self._counter, getattr(self._stats, self._counter) + seconds)
        if self._after is not None and kind is None:
            self._after(seconds)


@dataclass
class Counters:
    """Counters of one call or, cumulative, of a speculator. Times are wall-clock seconds on the host.

    On an accelerator the host waits once per round, during the target's time. A drafter's device time that overlaps
    this wait counts as the target's.

    Attributes:
        plain_steps: number of steps that plain decoding would have taken for the emitted tokens. A step emits a token
            for every row that the round emitted tokens for.
        round_seconds_with_draft, round_seconds_without_draft: seconds of the last rounds of whole batches, without
            those that compiled something.
        drafts_ahead: number of drafts that began while the target verified the round before.
        drafts_ahead_taken: number of these that had guessed that round right.
        ahead_seconds_saved: seconds of drafting for the right ones, which no round waited for.
        ahead_seconds_wasted: seconds of drafting for the wrong ones.
        accepted_by_source: drafter -> number of accepted tokens that it had drafted, if several draft together. "+"
            joins drafters of the same token.
        recorded_bytes: memory of the recordings that each of the last calls used, and of their buffers.
        attention: backends that attention could use in our forwards on a GPU, as one text -> number of calls.
        target_runners: runner -> number of forwards over trees: "native" (the kernel for packed weights), "graph"
            (captured or compiled), "eager" (modules).
        draft_runners: runner -> number of a drafter's forwards, or of its drafts that are one call. Empty for drafters
            without a model.
        fallbacks: reason -> number of requests in which something ran otherwise than a user may expect.
    """

    calls: int = 0
    sampled_calls: int = 0
    lossy_calls: int = 0
    rounds: int = 0
    rounds_without_draft: int = 0
    prefill_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    bonus_tokens: int = 0
    emitted_tokens: int = 0
    accepted_histogram: Counter[int] = field(default_factory=Counter)
    drafted_to_depth: Counter[int] = field(default_factory=Counter)
    accepted_to_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    target_forwards: int = 0
    target_seconds: float = 0.0
    drafter_seconds: float = 0.0
    prefill_seconds: float = 0.0
    drafter_prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    plain_steps: float = 0.0
    round_seconds_with_draft: list[float] = field(default_factory=list)
    round_seconds_without_draft: list[float] = field(default_factory=list)
    drafts_ahead: int = 0
    drafts_ahead_taken: int = 0
    ahead_seconds_saved: float = 0.0
    ahead_seconds_wasted: float = 0.0
    recorded_bytes: list[int] = field(default_factory=list)
    attention: Counter[str] = field(default_factory=Counter)
    target_runners: Counter[str] = field(default_factory=Counter)
    draft_runners: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)

    def timed(self, counter: str, after: Callable[[float], object] | None = None) -> Stopwatch:
        """A context that adds the time spent in it to one of the counters of seconds."""
        return Stopwatch(self, counter, after)

    def take_out(self, seconds: float, counter: str) -> None:
        """Subtracts time that others used from one of the counters of seconds, and from the total."""
        for name in (counter, "total_seconds"):
            setattr(self, name, getattr(self, name) - seconds)

    def add(self, round: Round) -> None:
        """Counts a round, row by row."""
        if round.is_prefill:
            self.prefill_tokens += sum(map(len, round.tokens))
            return
        if emitting := sum(map(bool, round.tokens)):
            self.plain_steps += sum(map(len, round.tokens)) / emitting
        if not round.is_warm_up:
            seconds = self.round_seconds_with_draft if round.num_nodes else self.round_seconds_without_draft
            seconds.append(round.seconds.total)
            del seconds[:-_KEPT]
        if not round.num_nodes:
            self.emitted_tokens += sum(map(len, round.tokens))
            self.rounds_without_draft += emitting
            return
        host = round.tree.host
        for row, tokens in enumerate(round.tokens):
            if tokens:
                slot = round.tree.slot(row)
                self.record_round(host.num_drafted(slot), host.depth(slot), len(tokens), round.num_accepted[row])

    def record_round(self, num_drafted: int, depth: int, num_emitted: int, num_accepted: int) -> None:
        """Counts one row's round.

        Args:
            num_drafted: number of draft nodes (without the root).
            depth: depth of the deepest one.
            num_emitted: number of emitted tokens.
            num_accepted: number of emitted tokens that were draft nodes; the rest (0 or 1) is the bonus token.
        """
        self.emitted_tokens += num_emitted
        if num_drafted == 0:
            self.rounds_without_draft += 1
            return
        self.rounds += 1
        self.drafted_tokens += num_drafted
        self.accepted_tokens += num_accepted
        self.bonus_tokens += num_emitted - num_accepted
        self.accepted_histogram[num_accepted] += 1
        self.drafted_to_depth.update(range(1, depth + 1))
        self.accepted_to_depth.update(range(1, num_accepted + 1))

    def count_ahead(self, seconds: float, waited: float, *, was_right: bool) -> None:
        """Counts a draft made ahead, with the seconds of drafting and the seconds that the round waited for it."""
        self.drafts_ahead += 1
        if was_right:
            self.drafts_ahead_taken += 1
            self.ahead_seconds_saved += max(seconds - waited, 0.0)
        else:
            self.ahead_seconds_wasted += seconds

    def merge(self, other: Counters) -> None:
        """Adds the counters of `other` to these."""
        for name in _names():
            mine, its = getattr(self, name), getattr(other, name)
            if isinstance(mine, Counter):
                mine.update(its)
            elif isinstance(mine, list):
                mine[:] = [*mine, *its][-_KEPT:]
            else:
                setattr(self, name, mine + its)

    @property
    def rejected_tokens(self) -> int:
        return self.drafted_tokens - self.accepted_tokens

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per drafted round, bonus token included; None before the first one. Rounds without a draft do not
        count: `tokens_per_round` has them."""
        return (self.accepted_tokens + self.bonus_tokens) / self.rounds if self.rounds else None

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens that a round emitted on average, with a draft or without; None before the first one. It compares
        drafters that do not always have a draft."""
        number = self.rounds + self.rounds_without_draft
        return self.emitted_tokens / number if number else None

    @property
    def acceptance_rate_by_depth(self) -> dict[int, float]:
        """Depth d -> share of the rounds with a node at depth d that were accepted to depth >= d."""
        return {d: self.accepted_to_depth[d] / n for d, n in sorted(self.drafted_to_depth.items())}

    @property
    def shares_by_depth(self) -> dict[int, float]:
        """Depth d -> share of all rounds with a draft that were accepted to depth >= d, up to one depth beyond the
        deepest accepted one."""
        deepest = max(self.accepted_to_depth, default=0) + 1
        return {d: self.accepted_to_depth[d] / self.rounds for d in sorted(self.drafted_to_depth) if d <= deepest}

    @property
    def plain_round_seconds(self) -> float | None:
        """Seconds of a round without a draft, nearly a step of plain `generate`; None after fewer than four of them."""
        return _typical(self.round_seconds_without_draft)

    @property
    def break_even_length(self) -> float | None:
        """Mean acceptance length at which rounds with a draft are as fast as rounds without; None where either is not
        known."""
        with_draft, without = _typical(self.round_seconds_with_draft), self.plain_round_seconds
        return with_draft / without if with_draft and without else None

    @property
    def estimated_speedup(self) -> float | None:
        """Speed-up over plain decoding, prefill left out: plain steps, each as long as a round without a draft, over
        the time taken. None after fewer than four such rounds."""
        prefill = self.prefill_seconds + self.drafter_prefill_seconds
        seconds, plain = self.total_seconds - prefill, self.plain_round_seconds
        return self.plain_steps * plain / seconds if plain and seconds > 0 else None

    @property
    def rest_seconds(self) -> float:
        """Time of the calls outside prefill (target's and drafter's), target and drafter."""
        counted = self.prefill_seconds + self.drafter_prefill_seconds + self.target_seconds + self.drafter_seconds
        return self.total_seconds - counted

    @property
    def engine_efficiency(self) -> float | None:
        """(target + drafter) / (target + drafter + rest), prefill left out; sampler and processors are target time."""
        busy = self.target_seconds + self.drafter_seconds
        return busy / (busy + self.rest_seconds) if busy else None

    def to_dict(self) -> dict[str, Any]:
        """All counters and figures as JSON-serialisable values."""
        raw = {name: _plain(getattr(self, name)) for name in _names()}
        return raw | {
            "rejected_tokens": self.rejected_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "tokens_per_round": self.tokens_per_round,
            "acceptance_rate_by_depth": self.acceptance_rate_by_depth,
            "break_even_length": self.break_even_length,
            "estimated_speedup": self.estimated_speedup,
            "rest_seconds": self.rest_seconds,
            "engine_efficiency": self.engine_efficiency,
        }


@cache
def _names() -> tuple[str, ...]:
    """Names of the counters."""
    return tuple(counter.name for counter in fields(Counters))


def _typical(seconds: Sequence[float]) -> float | None:
    return median(seconds) if len(seconds) >= _FEW else None


def _plain(value: Any) -> Any:
    if isinstance(value, Counter):
        return dict(sorted(value.items()))
    return list(value) if isinstance(value, list) else value
