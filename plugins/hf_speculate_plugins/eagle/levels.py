"""Static draft trees: a fixed structure, filled with the best-ranked children of every node.

Source: EAGLE-1: a tree is a list of choices (`hf_speculate_plugins.choices`), e.g. `[(0,), (1,), (0, 0)]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from hf_speculate.tree import ROOT_PARENT, TreePlan

from ..trees.static import Choices, checked_choices, parents_of


@dataclass(frozen=True)
class Level:
    """The nodes at one depth that have children, and those children.

    Attributes:
        nodes: indices of these nodes in the tree.
        previous: where each one's parent is among the previous level's `nodes`.
        children: indices of the children in the tree.
        child_parents, child_ranks: for each child, where its parent is among `nodes`, and its rank there.
    """

    nodes: tuple[int, ...]
    previous: tuple[int, ...]
    children: tuple[int, ...]
    child_parents: tuple[int, ...]
    child_ranks: tuple[int, ...]


@dataclass(frozen=True)
class StaticTree:
    """A tree structure with ranks; node 0 is the root, the others follow by depth, then by path.

    Attributes:
        choices: the path of every node but the root, in canonical order.
    """

    choices: Choices

    @classmethod
    def from_choices(cls, choices: Sequence[Sequence[int]]) -> StaticTree:
        """From a user's list in any order; raises `ValueError`, see `checked_choices`."""
        return cls(checked_choices(choices, "eagle"))

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of every node, -1 for the root."""
        return parents_of(self.choices)

    @cached_property
    def max_rank(self) -> int:
        return max(path[-1] for path in self.choices)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """Depth by depth the nodes that must be run, the root first."""
        by_parent: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents[1:], start=1):
            by_parent.setdefault(parent, []).append(node)
        levels, nodes, previous = [], (0,), (0,)
        while nodes:
            children = tuple(child for node in nodes for child in by_parent[node])
            child_parents = tuple(i for i, node in enumerate(nodes) for _ in by_parent[node])
            ranks = tuple(self.choices[child - 1][-1] for child in children)
            levels.append(Level(nodes, previous, children, child_parents, ranks))
            expanded = [(c, p) for c, p in zip(children, child_parents, strict=True) if c in by_parent]
            nodes, previous = tuple(c for c, _ in expanded), tuple(p for _, p in expanded)
        return tuple(levels)

    def forest(self, nodes: tuple[int, ...]) -> TreePlan:
        """Plan of `nodes` without the root: what was run of this tree while the root is committed already."""
        index = {0: ROOT_PARENT, **{node: i for i, node in enumerate(nodes)}}
        return TreePlan.from_parents([[index[self.parents[node]] for node in nodes]])

    def cut(self, depth: int) -> StaticTree:
        """The same tree down to `depth`."""
        return _cut(self, depth)


@lru_cache(maxsize=256)
def _cut(tree: StaticTree, depth: int) -> StaticTree:
    return StaticTree(tuple(path for path in tree.choices if len(path) <= depth))
