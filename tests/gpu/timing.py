"""Times of single calls: on the device by CUDA events, in recorded graphs, and on the host.

On a CPU the host's clock stands in for events, and nothing is recorded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .setting import synchronize


Call = Callable[[], Any]


class Marks:
    """Times of named parts of a call, on the device. Nothing waits until they are read.

    On CUDA a part lasts from the moment at which the device reaches its begin to that at which it reaches its end.
    """

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._parts: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A block that is one part."""
        begin = self._now()
        try:
            yield
        finally:
            self._parts.setdefault(name, []).append((begin, self._now()))

    def clear(self) -> None:
        """Forgets all parts."""
        self._parts.clear()

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self) -> dict[str, float]:
        """Sum of each part. The device must have been waited for."""
        return {name: sum(self._between(*pair) for pair in pairs) for name, pairs in self._parts.items()}

    def counts(self) -> dict[str, int]:
        """Number of times that each part ran."""
        return {name: len(pairs) for name, pairs in self._parts.items()}

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self._on_cuda else 1e3 * (end - begin)


def single_us(calls: Sequence[Call], device: torch.device, repeats: int) -> dict[str, float]:
    """Median and maximum of single calls in microseconds, each waited for. The calls take turns."""
    times = []
    for index in range(repeats):
        marks, call = Marks(device), calls[index % len(calls)]
        synchronize(device)
        with marks.part("call"):
            call()
        synchronize(device)
        times.append(1e3 * marks.milliseconds()["call"])
    return {"median": statistics.median(times), "max": max(times)}


def recorded_us(calls: Sequence[Call], device: torch.device, repeats: int) -> float | None:
    """Microseconds per call where all calls are one recorded graph: the device's time without the host's.

    Returns:
        Median over the replays; None on a CPU.
    """
    if device.type != "cuda":
        return None
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # libraries keep a workspace for each stream
        calls[0]()
    torch.cuda.current_stream(device).wait_stream(side)
    synchronize(device)
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for call in calls:
            call()
    graph.replay()
    found = single_us([graph.replay], device, repeats)["median"] / len(calls)
    graph.reset()
    return found
