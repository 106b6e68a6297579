"""Whether other processes use the cores that this one computes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import psutil
import torch


_ENOUGH_SECONDS = 0.5  # systems count CPU time in hundredths of a second
_TOLERATED = 0.25  # of a core: what the system itself does


class CpuSeconds(NamedTuple):
    """Seconds so far: on the clock, of all processes on this process's cores, of this process, and the number of these
    cores."""

    clock: float
    all: float
    own: float
    num_cores: int

    @classmethod
    def now(cls) -> CpuSeconds:
        found, idle = psutil.cpu_times(percpu=True), ("idle", "iowait")
        if hasattr(os, "sched_getaffinity"):
            found = [found[core] for core in os.sched_getaffinity(0) if core < len(found)]
        used = sum(sum(core[:8]) - sum(getattr(core, name, 0.0) for name in idle) for core in found)
        own = psutil.Process().cpu_times()
        return cls(time.monotonic(), used, own.user + own.system, len(found))


class OtherProcesses:
    """A look at what other processes have used since the last look.

    Args:
        now: function that returns the seconds so far.
    """

    def __init__(self, now: Callable[[], CpuSeconds] = CpuSeconds.now):
        self._now = now
        self._num_threads = torch.get_num_threads()  # a packed target lowers it during a request
        self._before = self._look()

    def are_in_the_way(self) -> bool | None:
        """Whether they left less than a core for each of PyTorch's threads since the last look; None if that was less
        than half a second ago, which is too short to know."""
        before, found = self._before, self._look()
        if before is None or found is None:  # this system does not report it
            return False
        seconds = found.clock - before.clock
        if seconds < _ENOUGH_SECONDS:
            return None
        self._before = found
        others = (found.all - before.all - (found.own - before.own)) / seconds
        return others + self._num_threads > found.num_cores + _TOLERATED

    def _look(self) -> CpuSeconds | None:
        with suppress(OSError, psutil.Error):
            return self._now()
        return None
