"""Which counts a drafter keeps of a text."""

from __future__ import annotations

from typing import NamedTuple

from .contexts import ContextCounts
from .counts import WindowCounts


Index = ContextCounts | WindowCounts


class IndexKind(NamedTuple):
    """What is counted of every text.

    Attributes:
        orders: of contexts, with smoothing; None without.
        depth: of windows, without smoothing; None with it.
    """

    orders: tuple[int, ...] | None
    depth: int | None

    def make(self) -> Index:
        if self.orders is not None:
            return ContextCounts(self.orders)
        assert self.depth is not None
        return WindowCounts(self.depth)
