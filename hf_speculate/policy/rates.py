"""Acceptance rates of the trees of a drafter by depth and size, learnt from rounds of any size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


# Sizes of trees between which the policy chooses (draft nodes, the root not counted).
LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

_DECAY = 0.93  # a memory of about 14 rounds
_PRIOR_RATE = 0.7  # before anything was seen: optimistic, so that drafts get a try
_PRIOR_WEIGHT = 0.5  # rounds; what is left of it when nothing is ever accepted (2 %) must not seem worth a node


class AcceptanceRates:
    """How far trees of every size on the ladder are accepted, from rounds of any size at least as wide.

    For every depth d and size n: the share of rounds whose path went on to depth d within the first n nodes, out of
    those where it had come to depth d - 1 within them. Old rounds fade. A path accepted to the end of its tree says
    nothing about the depth below (it is censored there).

    Args:
        decay: of what is known, with every round.
    """

    def __init__(self, decay: float = _DECAY) -> None:
        self._decay = decay
        self.widest = self.deepest = 0  # of the trees that were seen
        self._trials: list[list[float]] = []  # [depth - 1][size]
        self._hits: list[list[float]] = []

    def record(self, path: Sequence[int], num_nodes: int, depth: int) -> None:
        """Learns one row's round.

        Args:
            path: indices of the accepted draft nodes, from depth 1 on.
            num_nodes: draft nodes of the row's tree.
            depth: of the deepest of them.
        """
        self.widest, self.deepest = max(self.widest, num_nodes), max(self.deepest, depth)
        while len(self._trials) < depth:
            self._trials.append([0.0] * len(LADDER))
            self._hits.append([0.0] * len(LADDER))
        observed = bisect_left(LADDER, num_nodes) + 1  # the size that holds the whole tree stands for it
        first = 0  # sizes below `first` have lost the path already
        for level in range(min(len(path) + 1, depth)):
            next_first = bisect_left(LADDER, path[level]) if level < len(path) else observed
            trials, hits = self._trials[level], self._hits[level]
            for size in range(first, min(observed, len(LADDER))):
                trials[size] = self._decay * trials[size] + 1
                hits[size] = self._decay * hits[size] + (size >= next_first)
            first = next_first

    def fade(self, weight: float) -> None:
        """Weakens what is known: something new may have begun."""
        for table in (self._trials, self._hits):
            for row in table:
                row[:] = [weight * value for value in row]

    @classmethod
    def average(cls, rows: Sequence[AcceptanceRates]) -> AcceptanceRates:
        """What the rows of a batch know together, with the weight of one of them."""
        new = cls()
        new.widest, new.deepest = max(row.widest for row in rows), max(row.deepest for row in rows)
        for level in range(max(len(row._trials) for row in rows)):
            known = [row for row in rows if level < len(row._trials)]
            for name in ("_trials", "_hits"):
                columns = zip(*(getattr(row, name)[level] for row in known), strict=True)
                getattr(new, name).append([sum(column) / len(known) for column in columns])
        return new

    def expected_lengths(self, size: int, max_depth: int) -> list[float]:
        """Expected tokens of a round, bonus token included, with the first `LADDER[size]` nodes cut to depth 1, 2, …"""
        lengths, share, length, rate = [], 1.0, 1.0, _PRIOR_RATE
        for level in range(max_depth):
            if level < len(self._trials):
                trials, hits = self._trials[level][size], self._hits[level][size]
                rate = (hits + _PRIOR_WEIGHT * rate) / (trials + _PRIOR_WEIGHT)
            share *= rate
            length += share
            lengths.append(length)
        return lengths
