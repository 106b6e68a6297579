"""The number of PyTorch's threads between forwards, while other processes use the cores."""

from __future__ import annotations

import torch

from . import binding


class ThreadPool:
    """The number of PyTorch's threads in the calling thread, lowered after a forward and restored before the next one.

    While other processes use the cores, the kernel computes with fewer threads (`threads.h`). PyTorch would still
    divide its small operations (copies and maxima of logits) among all of them. Each would wait for a thread that
    another process keeps from running: some milliseconds, in a step of twenty.

    Forwards always have all threads, as the results of PyTorch's products depend on their number. If what runs between
    them does, too, the number is fixed.
    """

    def __init__(self, is_fixed: bool) -> None:
        self._is_fixed = is_fixed
        self._given = 0  # the number to restore; 0: nothing is lowered

    def restore(self) -> None:
        """Called before a forward, and when the request ends."""
        if self._given:
            binding.library().set_threads(self._given, self._given)
            self._given = 0

    def lower(self) -> None:
        """Called after a forward."""
        if self._is_fixed:
            return
        library, given = binding.library(), torch.get_num_threads()
        if (number := library.thread_pool_size(given)) < given:
            self._given = given
            library.set_threads(number, given)
