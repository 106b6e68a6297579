"""The next round's draft, made on a separate thread while the target verifies this one.

The text never depends on how long that takes. If the guess was right, the loop waits for the draft. Else it cancels and
drops the draft, and nothing else uses the session until the draft has ended. A wrong guess costs only time.
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
    """The thread of one request, with its share of PyTorch's threads.

    PyTorch (with OpenMP) keeps a thread count and a thread pool for every computing thread. So the threads of a target
    on the CPU are divided while both compute. A new thread takes the count that was set last in any thread. So threads
    that other code starts in the middle of a round may get the target's share.

    Args:
        device: device of the target. Threads are divided on a CPU only.
    """

    def __init__(self, device: torch.device):
        self._divides = device.type == "cpu"
        self._device = device
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hf_speculate-ahead")
        self._num_threads = 0

    def start(self, call: Callable[[], DraftTree]) -> Future[tuple[DraftTree, float]]:
        """Begins a call under this thread's PyTorch modes. Its result comes with the seconds that it took."""
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
        """Gives the target all threads again, after the call has ended."""
        torch.set_num_threads(self._num_threads)

    def close(self) -> None:
        self._executor.shutdown(wait=True)


def _modes(device: torch.device) -> Sequence[Callable[[], Any]]:
    """This thread's settings of the modes that PyTorch keeps for every thread."""
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
        worker: worker on whose thread the draft is made.
        call: function that makes the draft.
        cancelled: event that signals the drafter to stop.
        path: token ids that the draft assumes to be committed.

    Attributes:
        seconds: computing time of the thread, set when it has ended without an error.
        waited: seconds that the caller of `result` or `cancel` waited.
    """

    def __init__(self, worker: Worker, call: Callable[[], DraftTree], cancelled: Event, path: Sequence[int]):
        self.path = path
        self.seconds = self.waited = 0.0
        self._worker, self._cancelled = worker, cancelled
        self._has_ended = False
        self._future = worker.start(call)

    def result(self) -> DraftTree:
        """The draft, once it is made; raises the error of making it."""
        self._wait()
        self._end()
        tree, self.seconds = self._future.result()
        return tree

    def cancel(self) -> None:
        """Cancels the draft. Returns when the session is free again; an error of the draft is dropped."""
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
