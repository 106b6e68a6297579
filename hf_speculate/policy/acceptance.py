"""Estimates for one drafter: how likely each node of a tree is right, and what another level is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..drafting import MEMORY, Calibration
from ..tree import HostTree, TreeRow, node_depths


# Assumed worth of a level relative to the level above it, before any round was seen.
_PRIOR_RATIO = 0.7
_MORE_LEVELS = 8  # levels to consider beyond those already seen; a first draft is not deeper
# Assumed log-probability of the n-th sibling in a tree without values: it falls with the square of the rank.
# Calibration turns these into measured probabilities.
_RANKED = tuple(math.log(_PRIOR_RATIO / rank**2) for rank in range(1, 17))


@dataclass
class Average:
    """An average over the last rounds."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.total += value
        self.weight += 1

    def fade(self) -> None:
        self.total *= MEMORY
        self.weight *= MEMORY

    def follow(self, value: float) -> None:
        """Adds the newest value, and gives all earlier ones less weight."""
        self.fade()
        self.add(value)

    @property
    def mean(self) -> float | None:
        """The average; None without values."""
        return self.total / self.weight if self.weight else None

    def near(self, prior: float) -> float:
        """The mean, with `prior` counted as one more observation."""
        return (self.total + prior) / (self.weight + 1)


class Acceptance:
    """Acceptance statistics from the rounds of similar requests (same target and adapters, sampled or greedy).

    Args:
        calibration: maps the drafter's node values to probabilities.
    """

    def __init__(self, calibration: Calibration):
        self.calibration = calibration
        # For each depth d: the worth of the nodes at d + 1 minus their price, and the total probability of those at d.
        self._levels: list[tuple[Average, Average]] = []
        self._nodes: list[Average] = []  # probability of each node, by its index

    def probabilities(self, row: TreeRow) -> list[float]:
        """The probability that each node of a row is right; 0 for padding."""
        probabilities = [1.0]
        for node, value in enumerate(_own_values(row)[1:], start=1):
            parent = row.parents[node]
            probabilities.append(probabilities[parent] * self.calibration.share(value) if parent >= 0 else 0.0)
        return probabilities

    def count(self, row: TreeRow, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Learns from one row's tree, from every node whose parent was accepted.

        Args:
            path: indices of the accepted nodes, root first.
            tokens: token that was chosen after each node of `path`.
        """
        chosen = dict(zip(path, tokens, strict=False))
        for node, value in enumerate(_own_values(row)):
            wanted = chosen.get(row.parents[node])
            if node and wanted is not None:
                self.calibration.count(value, row.token_ids[node] == wanted)

    def note_levels(
        self, host: HostTree, rows: Sequence[int], probabilities: Sequence[Sequence[float]], price: float
    ) -> None:
        """Records what each level of a draft is worth.

        Args:
            rows: batch rows to average over, one for each entry of `probabilities`.
            price: cost of scoring one more node, in tokens.
        """
        worth, mass = [0.0], [1.0]
        for row, of_row in zip(rows, probabilities, strict=True):
            parents = host.parents[row]
            for depth, parent, probability in zip(node_depths(parents), parents, of_row, strict=True):
                if parent < 0:
                    continue
                while depth >= len(worth):
                    worth.append(0.0)
                    mass.append(0.0)
                worth[depth] += max(probability - price, 0.0) / len(rows)
                mass[depth] += probability / len(rows)
        for depth in range(1, len(worth)):
            if depth > len(self._levels):
                self._levels.append((Average(), Average()))
            for average, value in zip(self._levels[depth - 1], (worth[depth], mass[depth - 1]), strict=True):
                average.add(value)

    def note_nodes(self, probabilities: Sequence[Sequence[float]]) -> None:
        """Records how likely each node index is right, for trees that the host cannot read before they are scored."""
        width = max(map(len, probabilities), default=0)
        self._nodes += [Average() for _ in range(width - len(self._nodes))]
        for node in range(width):
            total = sum(of_row[node] for of_row in probabilities if node < len(of_row))
            self._nodes[node].add(total / len(probabilities))

    def fade(self) -> None:
        """Gives all earlier rounds less weight; called once per round."""
        self.calibration.fade()
        for average in (*self._nodes, *(average for level in self._levels for average in level)):
            average.fade()

    def next_level(self, depth: int) -> float:
        """The net worth in tokens of the level below `depth`, if the nodes at `depth` have a total probability of 1."""
        if depth >= len(self._levels):
            return _PRIOR_RATIO
        worth, mass = self._levels[depth]
        return (worth.total + _PRIOR_RATIO) / (mass.total + 1)

    def levels(self) -> list[float]:
        """The net worth in tokens of each level of a draft, averaged over recent drafts. The list ends with estimates
        for a few deeper levels."""
        levels: list[float] = []
        for depth in range(len(self._levels) + _MORE_LEVELS):
            expected = _PRIOR_RATIO * (levels[-1] if levels else 1.0)
            levels.append(self._levels[depth][0].near(expected) if depth < len(self._levels) else expected)
        return levels

    def nodes(self) -> list[float]:
        """The probability of each draft node, averaged over recent trees.

        A node that was not scored lately gets the probability of the node before it, so that it is tried again.
        """
        probabilities = [1.0]
        for average in self._nodes[1:]:
            probabilities.append(average.near(probabilities[-1]))
        return [*probabilities[1:], *probabilities[-1:] * len(probabilities)]


def _own_values(row: TreeRow) -> list[float]:
    """The log-probability of every node given its parent."""
    values, parents = row.values, row.parents
    if values is not None:
        return [values[node] - values[parent] if parent >= 0 else 0.0 for node, parent in enumerate(parents)]
    ranks: dict[int, int] = {}
    log_probs = []
    for parent in parents:
        ranks[parent] = rank = ranks.get(parent, 0) + 1
        log_probs.append(_RANKED[min(rank, len(_RANKED)) - 1])
    return log_probs
