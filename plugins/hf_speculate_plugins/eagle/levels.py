"""A static tree level by level: which of its nodes are run together, and whose children they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hf_speculate.tree import ROOT_PARENT, TreePlan

from ..trees import StaticTree


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


@lru_cache(maxsize=256)
def levels_of(tree: StaticTree) -> tuple[Level, ...]:
    """Depth by depth the nodes that must be run, the root first."""
    by_parent: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents[1:], start=1):
        by_parent.setdefault(parent, []).append(node)
    levels, nodes, previous = [], (0,), (0,)
    while nodes:
        children = tuple(child for node in nodes for child in by_parent[node])
        child_parents = tuple(i for i, node in enumerate(nodes) for _ in by_parent[node])
        ranks = tuple(tree.choices[child - 1][-1] for child in children)
        levels.append(Level(nodes, previous, children, child_parents, ranks))
        expanded = [(c, p) for c, p in zip(children, child_parents, strict=True) if c in by_parent]
        nodes, previous = tuple(c for c, _ in expanded), tuple(p for _, p in expanded)
    return tuple(levels)


def forest_of(tree: StaticTree, nodes: tuple[int, ...]) -> TreePlan:
    """Plan of `nodes` without the root: what was run of this tree while the root is committed already."""
    index = {0: ROOT_PARENT, **{node: i for i, node in enumerate(nodes)}}
    return TreePlan.from_parents([[index[tree.parents[node]] for node in nodes]])
