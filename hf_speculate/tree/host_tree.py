"""Draft trees as Python lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .plan import PADDING_PARENT, ROOT_PARENT, node_depths


class TreeRow(NamedTuple):
    """The nodes of one row, root first. `values` are those of `DraftTree`."""

    token_ids: Sequence[int]
    parents: Sequence[int]
    values: Sequence[float] | None = None

    def select(self, nodes: Sequence[int]) -> TreeRow:
        """The given nodes in the given order. The root must come first, and every node after its parent."""
        new = {ROOT_PARENT: ROOT_PARENT} | {node: position for position, node in enumerate(nodes)}
        return TreeRow(
            [self.token_ids[node] for node in nodes],
            [new[self.parents[node]] for node in nodes],
            None if self.values is None else [self.values[node] for node in nodes],
        )

    def best(self, count: int) -> TreeRow:
        """The root and the `count` draft nodes with the highest values, best first.

        Without values these are the first nodes. A node counts no more than its parent, and NaN counts as nothing.
        """
        nodes = [node for node, parent in enumerate(self.parents) if node and parent != PADDING_PARENT]
        if self.values is not None:
            worth = [0.0] * len(self.parents)
            for node in nodes:
                value = self.values[node]
                worth[node] = min(worth[self.parents[node]], value if value == value else -math.inf)
            nodes.sort(key=worth.__getitem__, reverse=True)  # stable: a parent stays before children of equal value
        return self.select([0, *nodes[:count]])

    def below(self, top: int) -> TreeRow:
        """The subtree of node `top`, which becomes the root."""
        nodes = [top]
        for node in range(top + 1, len(self.parents)):
            if self.parents[node] in nodes:
                nodes.append(node)
        values = self.values and [value - self.values[top] for value in self.values]
        row = TreeRow(self.token_ids, [*self.parents[:top], ROOT_PARENT, *self.parents[top + 1 :]], values)
        return row.select(nodes)

    def best_path(self) -> list[int]:
        """The path, root first, that takes the child of the highest value at every node. Without values it takes the
        first child."""
        path, values = [0], self.values
        while children := [node for node, parent in enumerate(self.parents) if parent == path[-1]]:
            path.append(children[0] if values is None else max(children, key=values.__getitem__))
        return path

    def pruned(self, max_depth: int) -> TreeRow:
        """The nodes down to `max_depth`, without padding."""
        depths = node_depths(self.parents)
        is_drafted = [parent != PADDING_PARENT for parent in self.parents]
        return self.select([node for node, depth in enumerate(depths) if is_drafted[node] and depth <= max_depth])


@dataclass(frozen=True)
class HostTree:
    """A draft tree as Python lists, indexed by row and node: `token_ids[r][i]`, `parents[r][i]`, `values[r][i]`."""

    token_ids: list[list[int]]
    parents: list[list[int]]
    values: list[list[float]] | None = None

    def part(self, rows: Sequence[int], width: int) -> HostTree:
        """The first `width` nodes of some rows."""
        return HostTree(
            [self.token_ids[row][:width] for row in rows],
            [self.parents[row][:width] for row in rows],
            None if self.values is None else [self.values[row][:width] for row in rows],
        )

    def rows(self) -> list[TreeRow]:
        values: Sequence[list[float] | None] = self.values or [None] * len(self.token_ids)
        rows = zip(self.token_ids, self.parents, values, strict=True)
        return [TreeRow(tokens, parents, of_row) for tokens, parents, of_row in rows]

    def child(self, row: int, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, or None."""
        tokens, parents = self.token_ids[row], self.parents[row]
        for candidate in range(node + 1, len(tokens)):
            if parents[candidate] == node and tokens[candidate] == token:
                return candidate
        return None

    def num_drafted(self, row: int) -> int:
        """Number of draft nodes of a row, without root and padding."""
        return sum(parent >= 0 for parent in self.parents[row])

    def depth(self, row: int) -> int:
        """Depth of the deepest draft node of a row."""
        return max(node_depths(self.parents[row]))
