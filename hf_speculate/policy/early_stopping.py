"""Early stopping: while a draft is made, the policy decides before each level whether that level pays."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..drafting import Calibration
from .acceptance import Acceptance


class PathProbabilities:
    """Probabilities of a draft's nodes, computed level by level while it is drafted.

    Args:
        calibration: maps the drafter's node values to probabilities.
    """

    def __init__(self, calibration: Calibration):
        self._calibration = calibration
        self._nodes: list[list[tuple[float, float]]] = []  # values and probabilities of the last level's nodes

    def __call__(self, values: Tensor, previous: Tensor | None = None) -> list[list[float]]:
        """The probability of each node of the next level, for the arguments of `EarlyStopping`."""
        above, share = self._nodes, self._calibration.share
        parents = None if previous is None else previous.tolist()
        self._nodes = []
        for row, row_values in enumerate(values.tolist()):
            nodes = []
            for node, value in enumerate(row_values):
                parent = node if parents is None else parents[row][node]
                before, probability = above[row][parent] if above else (0.0, 1.0)
                nodes.append((value, probability * share(value - before)))
            self._nodes.append(nodes)
        return [[probability for _, probability in row] for row in self._nodes]


class WhilePaying:
    """Continues a draft while the nodes to expand are likely enough to be right.

    Args:
        acceptance: acceptance statistics of the drafter.
        rows: batch rows to average over.
        price: cost of drafting one more level, in tokens.
    """

    def __init__(self, acceptance: Acceptance, rows: Sequence[int], price: float):
        self._acceptance, self._rows, self._price = acceptance, rows, price
        self._depth = self._num_yes = 0
        self._probabilities = PathProbabilities(acceptance.calibration)

    @property
    def is_asked(self) -> bool:
        """Whether the drafter has asked at least once."""
        return self._depth > 0

    @property
    def levels(self) -> int:
        """Number of levels that were drafted."""
        return self._num_yes + 1

    def __call__(self, values: Tensor, previous: Tensor | None = None) -> bool:
        self._depth += 1
        probabilities = self._probabilities(values, previous)
        # Drafters may leave out finished rows, but need not: finished rows do not count here.
        rows = [row for row in self._rows if row < len(probabilities)] or range(len(probabilities))
        mass = sum(sum(probabilities[row]) for row in rows) / len(rows)
        pays = mass * self._acceptance.next_level(self._depth) > self._price
        self._num_yes += pays
        return pays
