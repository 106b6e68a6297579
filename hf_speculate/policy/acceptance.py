"""The worth of one drafter's drafts: how likely each node of a tree is right, and what another level brings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..drafting import MEMORY, Calibration
from ..tree import HostTree, TreeRow, node_depths


# Before anything was seen: what a level is worth to the one above it.
_PRIOR_RATIO = 0.7
_MORE_LEVELS = 8  # than were seen; a first draft is no deeper
# Of siblings in a tree without values, the next ones are right as many times less as the square of their rank: a rank
# is as good a value as any, once it is calibrated.
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

    def near(self, prior: float) -> float:
        """The mean, with `prior` as one more observation."""
        return (self.total + prior) / (self.weight + 1)


class Acceptance:
    """Learnt from the rounds of requests that are alike (target, adapters, sampled or not).

    Args:
        calibration: of the drafter's values.
    """

    def __init__(self, calibration: Calibration):
        self.calibration = calibration
        # What the nodes at depth d + 1 were worth, their price taken off, and the probability of those at depth d.
        self._levels: list[tuple[Average, Average]] = []
        self._nodes: list[Average] = []  # probability of the nodes, by their index

    def probabilities(self, row: TreeRow) -> list[float]:
        """The probability that a node is right, for every node of a row; 0 for padding."""
        found = [1.0]
        for node, value in enumerate(_own_values(row)[1:], start=1):
            parent = row.parents[node]
            found.append(found[parent] * self.calibration.share(value) if parent >= 0 else 0.0)
        return found

    def count(self, row: TreeRow, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Learns what became of a row's tree: of every node whose parent was right.

        Args:
            path: accepted nodes, root first.
            tokens: `tokens[j]` was chosen after `path[j]`.
        """
        chosen = dict(zip(path, tokens, strict=False))
        for node, value in enumerate(_own_values(row)):
            wanted = chosen.get(row.parents[node])
            if node and wanted is not None:
                self.calibration.count(value, row.token_ids[node] == wanted)

    def note_levels(
        self, host: HostTree, rows: Sequence[int], probabilities: Sequence[Sequence[float]], price: float
    ) -> None:
        """Notes what the levels of a draft are worth.

        Args:
            rows: those that count, one of `probabilities` each.
            price: of a node, in tokens.
        """
        worth, mass = [0.0], [1.0]
        for row, found in zip(rows, probabilities, strict=True):
            for depth, parent, share in zip(node_depths(host.parents[row]), host.parents[row], found, strict=True):
                if parent < 0:
                    continue
                while depth >= len(worth):
                    worth.append(0.0)
                    mass.append(0.0)
                worth[depth] += max(share - price, 0.0) / len(rows)
                mass[depth] += share / len(rows)
        for depth in range(1, len(worth)):
            if depth > len(self._levels):
                self._levels.append((Average(), Average()))
            for average, value in zip(self._levels[depth - 1], (worth[depth], mass[depth - 1]), strict=True):
                average.add(value)

    def note_nodes(self, probabilities: Sequence[Sequence[float]]) -> None:
        """Notes how likely the nodes of a tree are right, for trees that cannot be looked at before they are scored."""
        width = max(map(len, probabilities), default=0)
        self._nodes += [Average() for _ in range(width - len(self._nodes))]
        for node in range(width):
            shares = (found[node] for found in probabilities if node < len(found))
            self._nodes[node].add(sum(shares) / len(probabilities))

    def fade(self) -> None:
        """A round has passed."""
        self.calibration.fade()
        for average in (*self._nodes, *(each for level in self._levels for each in level)):
            average.fade()

    def next_level(self, depth: int) -> float:
        """Tokens that the level behind `depth` is worth, its nodes' price taken off, where the nodes at `depth` are
        right with probability 1 together."""
        if depth >= len(self._levels):
            return _PRIOR_RATIO
        worth, mass = self._levels[depth]
        return (worth.total + _PRIOR_RATIO) / (mass.total + 1)

    def levels(self) -> list[float]:
        """Tokens that each level of a draft is worth, as the last ones were, their nodes' price taken off; and what
        more levels would be."""
        found: list[float] = []
        for depth in range(len(self._levels) + _MORE_LEVELS):
            expected = _PRIOR_RATIO * (found[-1] if found else 1.0)
            found.append(self._levels[depth][0].near(expected) if depth < len(self._levels) else expected)
        return found

    def nodes(self) -> list[float]:
        """Probability of each draft node of a tree, as those of the last trees were; of those that were not scored
        lately, what that of the node before is: they may be worth another look."""
        found = [1.0]
        for average in self._nodes[1:]:
            found.append(average.near(found[-1]))
        return [*found[1:], *found[-1:] * len(found)]


def _own_values(row: TreeRow) -> list[float]:
    """The value of every node below its parent."""
    values, parents = row.values, row.parents
    if values is not None:
        return [values[node] - values[parent] if parent >= 0 else 0.0 for node, parent in enumerate(parents)]
    ranks: dict[int, int] = {}
    found = []
    for parent in parents:
        ranks[parent] = rank = ranks.get(parent, 0) + 1
        found.append(_RANKED[min(rank, len(_RANKED)) - 1])
    return found
