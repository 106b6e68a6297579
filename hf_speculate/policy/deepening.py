"""Whether another level of a draft pays, asked while it is drafted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .acceptance import Acceptance


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
        self._nodes: list[list[tuple[float, float]]] = []  # of the last level: values, and probabilities to be right

    @property
    def is_asked(self) -> bool:
        """Whether anybody has asked."""
        return self._depth > 0

    @property
    def levels(self) -> int:
        """That were drafted."""
        return self._num_yes + 1

    def __call__(self, values: Tensor, previous: Tensor | None = None) -> bool:
        self._depth += 1
        above, share = self._nodes, self._acceptance.calibration.share
        parents = None if previous is None else previous.tolist()
        self._nodes = []
        for row, found in enumerate(values.tolist()):
            nodes = []
            for node, value in enumerate(found):
                parent = node if parents is None else parents[row][node]
                before, probability = above[row][parent] if above else (0.0, 1.0)
                nodes.append((value, probability * share(value - before)))
            self._nodes.append(nodes)
        # A drafter may leave out rows that have ended; if it has not, they do not count.
        rows = [row for row in self._rows if row < len(self._nodes)] or range(len(self._nodes))
        mass = sum(probability for row in rows for _, probability in self._nodes[row]) / len(rows)
        pays = mass * self._acceptance.next_level(self._depth) > self._price
        self._num_yes += pays
        return pays
