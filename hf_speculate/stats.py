"""What speculation did: counts, acceptance, times.

Definitions (vLLM's wording): mean acceptance length = tokens emitted by rounds / rounds that had a draft, the bonus
token included; the token from the prefill and rounds without a draft (N = 1) are counted apart. Acceptance rate at
depth d = rounds accepted to depth >= d / rounds that had a node there (unconditional). A "round" here is one row's
share of a round, so a batch of 4 rows makes 4.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .round import Round


class _Stopwatch:
    """Adds the time between entering and leaving to a counter, however it is left."""

    def __init__(self, stats: SpeculationStats, counter: str):
        self._stats, self._counter, self._start = stats, counter, 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_exception: object) -> None:
        seconds = getattr(self._stats, self._counter) + time.perf_counter() - self._start
        setattr(self._stats, self._counter, seconds)


@dataclass
class SpeculationStats:
    """Counters of one call or, cumulative, of a speculator. Times are seconds of wall clock on the host.

    On an accelerator the host waits once a round, in the target's share; a drafter's device time that overlaps it is
    counted there.
    """

    calls: int = 0
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
    target_forwards: int = 0
    target_seconds: float = 0.0
    drafter_seconds: float = 0.0
    prefill_seconds: float = 0.0
    drafter_prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def reset(self) -> None:
        """Sets every counter to zero."""
        self.__init__()

    def timed(self, counter: str) -> _Stopwatch:
        """A context manager that adds the time spent in it to one of the counters of seconds."""
        return _Stopwatch(self, counter)

    def take_out(self, seconds: float, counter: str) -> None:
        """Takes time that others used out of one of the counters of seconds, and out of the total."""
        for name in (counter, "total_seconds"):
            setattr(self, name, getattr(self, name) - seconds)

    def add(self, round: Round) -> None:
        """Counts what a round did, row by row."""
        if round.is_prefill:
            self.prefill_tokens += sum(map(len, round.tokens))
            return
        host = round.tree.host
        for row, tokens in enumerate(round.tokens):
            if tokens:
                slot = round.tree.slot(row)
                self.record_round(host.num_drafted(slot), host.depth(slot), len(tokens), round.num_accepted[row])

    def record_round(self, num_drafted: int, depth: int, num_emitted: int, num_accepted: int) -> None:
        """Counts one row's round.

        Args:
            num_drafted: draft nodes (without the root).
            depth: depth of the deepest of them.
            num_emitted: tokens emitted.
            num_accepted: those of them that were draft nodes; the rest (0 or 1) is the bonus token.
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

    def merge(self, other: SpeculationStats) -> None:
        """Adds the counters of `other` to these."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    @property
    def rejected_tokens(self) -> int:
        return self.drafted_tokens - self.accepted_tokens

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a round with a draft emitted on average, bonus token included; None before the first one."""
        return (self.accepted_tokens + self.bonus_tokens) / self.rounds if self.rounds else None

    @property
    def acceptance_rate_by_depth(self) -> dict[int, float]:
        """Depth d -> share of the rounds with a node at depth d that were accepted to depth >= d."""
        return {d: self.accepted_to_depth[d] / n for d, n in sorted(self.drafted_to_depth.items())}

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
        """Everything as JSON-serialisable values, derived figures included."""
        raw = {k: dict(sorted(v.items())) if isinstance(v, Counter) else v for k, v in vars(self).items()}
        return raw | {
            "rejected_tokens": self.rejected_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate_by_depth": self.acceptance_rate_by_depth,
            "rest_seconds": self.rest_seconds,
            "engine_efficiency": self.engine_efficiency,
        }
