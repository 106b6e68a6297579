"""PyTorch's threads between the forwards of a request, while other processes use the cores.

The kernel then computes with fewer threads (`threads.h`). PyTorch would still divide its small operations (copies and
maxima of logits) among all of them, and each would wait for a thread that another process keeps from running: some
milliseconds, in a step of twenty.
"""

from __future__ import annotations

import torch

from . import binding


class Crew:
    """The number of PyTorch's threads in the calling thread, lowered after a forward and restored before the next one.

    Forwards always have all threads, as the results of PyTorch's products depend on their number. What runs between
    them must not.

    Args:
        is_fixed: whether the number stays as it is.
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
        if (number := library.team_size(given)) < given:
            self._given = given
            library.set_threads(number, given)
