"""The time of one request: seconds by phase for its statistics, and the seconds of its rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..stats import SpeculationStats
from ..tree import RoundClock, RoundSeconds


class Meter:
    """Measures the phases of one request.

    Args:
        stats: counters of seconds that the phases add to.
        clock: clock of the rounds.
        take_others: function that returns the seconds that the streamer has used since its last call; they do not count
            as ours.
    """

    def __init__(self, stats: SpeculationStats, clock: RoundClock, take_others: Callable[[], float]):
        self._stats, self._clock, self._take_others = stats, clock, take_others

    def begin_round(self) -> None:
        self._clock.start()

    @contextmanager
    def prefilling(self) -> Iterator[None]:
        """The prompt's forward and the first choice."""
        with self._stats.timed("prefill_seconds"):
            yield
        self._leave_out_others("prefill_seconds")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The drafter reads the prompt. The time belongs to no round."""
        before = self._stats.drafter_prefill_seconds
        with self._stats.timed("drafter_prefill_seconds"):
            yield
        self._clock.leave_out(self._stats.drafter_prefill_seconds - before)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """The policy chooses, and the drafter drafts."""
        with self._stats.timed("drafter_seconds"):
            yield
        self._clock.drafted()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """The target's forward."""
        with self._stats.timed("target_seconds"):
            yield

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """The walk down the tree."""
        with self._stats.timed("target_seconds"):
            yield
        self._leave_out_others("target_seconds")

    def settle_ahead(self, settle: Callable[[], float]) -> None:
        """Runs `settle`, which waits for a draft made ahead: the seconds that it returns belong to the next round."""
        with self._stats.timed("drafter_seconds"):
            self._clock.put_off(settle())

    def end_round(self) -> RoundSeconds:
        """Ends the round; from here on its listeners are called."""
        return self._clock.stop()

    def published(self) -> None:
        """Ends the time of the listeners."""
        self._clock.published()

    def _leave_out_others(self, counter: str) -> None:
        if seconds := self._take_others():
            self._stats.take_out(seconds, counter)
            self._clock.leave_out(seconds)
