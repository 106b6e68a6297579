"""The next round's draft, made on a thread of its own while the target verifies this one's.

Nothing of a request depends on how long that takes: a draft whose guess was right is waited for, any other is told to
end and thrown away, and until it has ended nobody else uses the session. What is lost is time only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event
from typing import Any

import torch

from ..tree import DraftTree


class Worker:
    """The thread of one request, and the share of PyTorch's threads that it computes with.

    PyTorch (with OpenMP) keeps the number of its threads for every thread that computes, and a pool for each: so those
    of a target on the CPU are divided while both compute. New threads take the number that was set last, anywhere:
    those that somebody else begins in the middle of a round may find the target's share.

    Args:
        device: of the target; on any other than a CPU nothing has to be divided.
    """

    def __init__(self, device: torch.device):
        self._divides = device.type == "cpu"
        self._device = device
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hf_speculate-ahead")
        self._num_threads = 0

    def start(self, call: Callable[[], DraftTree]) -> Future[tuple[DraftTree, float]]:
        """Begins a call, with what PyTorch's modes are here. Its result is with the seconds that it took."""
        self._num_threads = torch.get_num_threads()
        share = max(self._num_threads // 4, 1) if self._divides else self._num_threads
        if self._divides:
            torch.set_num_threads(max(self._num_threads - share, 1))
        modes = _modes(self._device)

        def run() -> tuple[DraftTree, float]:
            started = time.perf_counter()
            torch.set_num_threads(share)
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode())
                tree = call()
            return tree, time.perf_counter() - started

        return self._executor.submit(run)

    def finished(self) -> None:
        """The call has ended: the target has all threads again."""
        torch.set_num_threads(self._num_threads)

    def close(self) -> None:
        """Ends the thread."""
        self._executor.shutdown(wait=True)


def _modes(device: torch.device) -> Sequence[Callable[[], Any]]:
    """The modes that PyTorch keeps for every thread, as they are on this one."""
    inference = torch.is_inference_mode_enabled()
    modes: list[Callable[[], Any]] = [lambda: torch.inference_mode(inference), torch.no_grad]
    for kind in {"cpu", device.type}:
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            modes.append(lambda kind=kind, dtype=dtype: torch.autocast(kind, dtype))
    return modes


class Pending:
    """A draft that is being made.

    Args:
        worker: whose thread makes it.
        call: makes it.
        cancelled: what it looks at.
        path: tokens that it takes for committed.

    Attributes:
        seconds: that the thread computed, once it has ended without an error.
        waited: seconds until it had ended, of whoever asked for it or cancelled it.
    """

    def __init__(self, worker: Worker, call: Callable[[], DraftTree], cancelled: Event, path: Sequence[int]):
        self.path = path
        self.seconds = self.waited = 0.0
        self._worker, self._cancelled = worker, cancelled
        self._has_ended = False
        self._future = worker.start(call)

    def result(self) -> DraftTree:
        """The draft, when it has been made; raises what it raised."""
        self._wait()
        self._end()
        tree, self.seconds = self._future.result()
        return tree

    def cancel(self) -> None:
        """Nobody wants the draft any more. Returns when the session is free again; a draft's error is lost with it."""
        if self._has_ended:
            return
        self._cancelled.set()
        if not self._future.cancel():  # it has begun
            self._wait()
            if self._future.exception() is None:
                self.seconds = self._future.result()[1]
        self._end()

    def _wait(self) -> None:
        started = time.perf_counter()
        self._future.exception()
        self.waited = time.perf_counter() - started

    def _end(self) -> None:
        self._has_ended = True
        self._worker.finished()
