"""The time of one request: seconds by phase for its statistics, and the seconds of its rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from ..graphs import GraphRunner
from ..stats import SpeculationStats
from ..tree import RoundSeconds
from .delivery import Delivery


class DeviceEvent(Protocol):
    """An event of `torch.cuda`, with timing."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class RoundClock:
    """Measures the rounds of one request.

    The time of consumers is left out. The time that listeners take counts for the next round.

    Args:
        events: two events of the device on which drafts are made; None if the host waits for drafts anyway. The host
            only launches a draft, and waits for it together with the target's forward. The events separate the two.
    """

    def __init__(self, events: tuple[DeviceEvent, DeviceEvent] | None = None) -> None:
        self._start = self._published = 0.0
        self._drafting = self._carried = self._put_off = self._reading = 0.0
        self._events, self._is_timed = events, False

    def start(self) -> None:
        self._start, self._is_timed = time.perf_counter() - self._carried, False
        self._reading = 0.0
        if self._events is not None:
            self._events[0].record()

    def drafted(self) -> None:
        """Ends the drafting time."""
        self._drafting = time.perf_counter() - self._start
        if self._events is not None:
            self._events[1].record()
            self._is_timed = True

    def leave_out(self, seconds: float) -> None:
        """Subtracts time within the round that others took."""
        self._start += seconds

    def read(self, seconds: float) -> None:
        """Subtracts the time in which the drafter read the prompt."""
        self.leave_out(seconds)
        self._reading += seconds

    def put_off(self, seconds: float) -> None:
        """Moves time of this round to the next round's draft."""
        self.leave_out(seconds)
        self._put_off += seconds

    def stop(self) -> RoundSeconds:
        """Ends the round; from here on its listeners are called."""
        self._published = time.perf_counter()
        total = self._published - self._start
        drafting = min(max(self._drafting, self._seconds_on_device()), total)
        return RoundSeconds(drafting, total, self._reading)

    def _seconds_on_device(self) -> float:
        """Seconds until the device had made the draft. By now the host has waited for it."""
        if self._events is None or not self._is_timed or not self._events[1].query():
            return 0.0
        return self._carried + self._events[0].elapsed_time(self._events[1]) / 1000

    def published(self) -> None:
        """Ends the time of the listeners."""
        self._carried = time.perf_counter() - self._published + self._put_off
        self._put_off = 0.0


class Meter:
    """Measures the phases of one request.

    Args:
        stats: counters of seconds that the phases add to.
        clock: clock of the rounds.
        delivery: delivery to a streamer, whose time does not count as ours; None if there is no streamer.
        runner: graph runner of target and drafter; None if nothing is compiled or captured.

    Attributes:
        prefilling: context of the prompt's forward and the first choice.
        reading: context in which the drafter reads the prompt. Its time belongs to no round.
        drafting: context in which the policy chooses, and the drafter drafts.
        scoring: context of the target's forward.
        verifying: context of the walk down the tree.
    """

    def __init__(
        self, stats: SpeculationStats, clock: RoundClock, delivery: Delivery | None, runner: GraphRunner | None
    ):
        self._stats, self._clock, self._delivery, self._runner = stats, clock, delivery, runner
        self._num_slow = 0
        self.prefilling = stats.timed("prefill_seconds", lambda _: self._leave_out_others("prefill_seconds"))
        self.reading = stats.timed("drafter_prefill_seconds", clock.read)
        self.drafting = stats.timed("drafter_seconds", lambda _: clock.drafted())
        self.scoring = stats.timed("target_seconds")
        self.verifying = stats.timed("target_seconds", lambda _: self._leave_out_others("target_seconds"))

    def begin_round(self) -> None:
        self._num_slow = self._count_slow()
        self._clock.start()

    @property
    def has_compiled(self) -> bool:
        """Whether anything was compiled or captured since the round began."""
        return self._count_slow() != self._num_slow

    def wait_for_ahead(self, resolve: Callable[[], float]) -> None:
        """Runs `resolve`, which waits for a draft made ahead: the seconds that it returns belong to the next round."""
        with self._stats.timed("drafter_seconds"):
            self._clock.put_off(resolve())

    def end_round(self) -> RoundSeconds:
        """Ends the round; from here on its listeners are called."""
        return self._clock.stop()

    def published(self) -> None:
        """Ends the time of the listeners."""
        self._clock.published()

    def close(self) -> None:
        """Notes the memory that graphs of the request have used."""
        if self._runner is not None and self._runner.num_bytes:
            self._stats.recorded_bytes.append(self._runner.num_bytes)

    def _count_slow(self) -> int:
        return 0 if self._runner is None else self._runner.num_slow

    def _leave_out_others(self, counter: str) -> None:
        if self._delivery is not None and (seconds := self._delivery.take_seconds()):
            self._stats.take_out(seconds, counter)
            self._clock.leave_out(seconds)
