"""Whether another level of a draft pays, asked while it is drafted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..drafting import Calibration
from .acceptance import Acceptance


class PathProbabilities:
    """The probability that the nodes of a draft are right, while it is drafted; asked level by level.

    Args:
        calibration: of the drafter.
    """

    def __init__(self, calibration: Calibration):
        self._calibration = calibration
        self._nodes: list[list[tuple[float, float]]] = []  # of the last level: values, and probabilities to be right

    def __call__(self, values: Tensor, previous: Tensor | None = None) -> list[list[float]]:
        """The probability of the nodes of the next level and all above them. Arguments: see `Deepening`."""
        above, share = self._nodes, self._calibration.share
        parents = None if previous is None else previous.tolist()
        self._nodes = []
        for row, found in enumerate(values.tolist()):
            nodes = []
            for node, value in enumerate(found):
                parent = node if parents is None else parents[row][node]
                before, probability = above[row][parent] if above else (0.0, 1.0)
                nodes.append((value, probability * share(value - before)))
            self._nodes.append(nodes)
        return [[probability for _, probability in row] for row in self._nodes]


class WhilePaying:
    """Says yes while the nodes that are to be expanded are likely enough to be right.

    Args:
        acceptance: of the drafter.
        rows: that count.
        price: of a level, in tokens.
    """

    def __init__(self, acceptance: Acceptance, rows: Sequence[int], price: float):
        self._acceptance, self._rows, self._price = acceptance, rows, price
        self._depth = self._num_yes = 0
        self._probabilities = PathProbabilities(acceptance.calibration)

    @property
    def is_asked(self) -> bool:
        """Whether anybody has asked."""
        return self._depth > 0

    @property
    def levels(self) -> int:
        """The number of levels that were drafted."""
        return self._num_yes + 1

    def __call__(self, values: Tensor, previous: Tensor | None = None) -> bool:
        self._depth += 1
        found = self._probabilities(values, previous)
        # A drafter may leave out rows that have ended; if it has not, they do not count.
        rows = [row for row in self._rows if row < len(found)] or range(len(found))
        mass = sum(sum(found[row]) for row in rows) / len(rows)
        pays = mass * self._acceptance.next_level(self._depth) > self._price
        self._num_yes += pays
        return pays
