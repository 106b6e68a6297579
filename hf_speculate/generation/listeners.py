"""The listeners of a round: statistics, records, drafter and policy; and the clock that leaves them out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..drafting import Drafting
from ..policy import PolicySession
from ..round import Round, RoundSeconds
from ..scoring import Scorer, layer_windows
from ..stats import SpeculationStats
from ..verification import Sampler, Sequences


Listener = Callable[[Round, Any], None]
"""Told of every round, with the output of its forward, which the round does not keep."""


def listeners(
    stats: SpeculationStats,
    sampler: Sampler,
    sequences: Sequences,
    scorer: Scorer,
    drafting: Drafting,
    policy: PolicySession,
) -> Sequence[Listener]:
    """Those of one request, in the order in which they are told."""
    records = sampler.records
    windows = layer_windows(scorer.model.config) if records.forward_kwargs else ()

    def count(round: Round, _output: Any) -> None:
        stats.add(round)

    def record(round: Round, output: Any) -> None:
        records.add_round(round, output, sequences.num_emitted, windows, scorer.whole_output)

    def observe(round: Round, output: Any) -> None:
        with stats.timed("drafter_seconds"):
            drafting.observe_choices(round, output.logits, sampler)
            drafting.observe(round, output.hidden_states)

    def learn(round: Round, _output: Any) -> None:
        if any(round.tokens):
            policy.learn(round)

    return [count, record, observe, learn] if records.forward_kwargs else [count, observe, learn]


class RoundClock:
    """Times one round after the other. The time of a round's consumers is not in it; what telling of a round took
    counts for the next one."""

    def __init__(self) -> None:
        self._start = self._published = 0.0
        self._drafting = self._carried = self._put_off = 0.0

    def start(self) -> None:
        self._start = time.perf_counter() - self._carried

    def drafted(self) -> None:
        """The tree is there."""
        self._drafting = time.perf_counter() - self._start

    def leave_out(self, seconds: float) -> None:
        """Takes time of others, within the round, out of it."""
        self._start += seconds

    def put_off(self, seconds: float) -> None:
        """Counts time of this round to the next one's draft."""
        self.leave_out(seconds)
        self._put_off += seconds

    def stop(self) -> RoundSeconds:
        """The round is over, and is told of from here on."""
        self._published = time.perf_counter()
        return RoundSeconds(drafting=self._drafting, total=self._published - self._start)

    def told(self) -> None:
        """Everybody has been told."""
        self._carried = time.perf_counter() - self._published + self._put_off
        self._put_off = 0.0
