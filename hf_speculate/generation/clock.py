"""Where the time of a round goes."""

from __future__ import annotations

import time

from ..round import RoundSeconds


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
