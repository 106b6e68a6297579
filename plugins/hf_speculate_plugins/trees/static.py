"""Static draft trees, a structure that is fixed before drafting: one set of rules for every method that takes them.

A *choice* is the path of a node, the ranks of its tokens under their parents: `(0, 2)` is the third best child of the
root's best child. Source: Medusa (arXiv:2401.10774) and EAGLE-1 (arXiv:2401.15077), whose published lists these are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from hf_speculate.transfers import to_device
from hf_speculate.tree import ROOT_PARENT, TreePlan


TreeChoices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StaticTree:
    """A tree structure with ranks; node 0 is the root, node i + 1 is `choices[i]`.

    Attributes:
        choices: the path of every node but the root, parents before children, siblings in the order of their ranks.
    """

    choices: TreeChoices

    @classmethod
    def of(cls, choices: Iterable[Sequence[int]], method: str) -> StaticTree:
        """The tree of a user's list in any order.

        Args:
            method: name of the method that has the option, for messages.
        Raises:
            ValueError: no choices, one twice, an empty one, ranks that are no integers from 0, or a choice without its
                parent.
        """
        return cls(_checked(choices, method))

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of every node, -1 for the root."""
        node_of = {(): 0, **{path: node for node, path in enumerate(self.choices, start=1)}}
        return (ROOT_PARENT, *(node_of[path[:-1]] for path in self.choices))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of ranks used at depth 1, 2, …"""
        depths = range(1, max(map(len, self.choices), default=0) + 1)
        return tuple(1 + max(path[-1] for path in self.choices if len(path) == depth) for depth in depths)

    @property
    def max_depth(self) -> int:
        return len(self.widths)

    def cut(self, depth: int) -> StaticTree:
        """The same tree down to `depth`."""
        return self if depth >= self.max_depth else _cut(self, depth)


@lru_cache(maxsize=256)
def _cut(tree: StaticTree, depth: int) -> StaticTree:
    return StaticTree(tuple(path for path in tree.choices if len(path) <= depth))


@lru_cache(maxsize=64)
def path_sums(tree: StaticTree, device: torch.device) -> Float[Tensor, "N N"]:
    """The matrix that turns values of nodes into values of their paths; in single precision."""
    ancestors = TreePlan.from_parents([tree.parents]).ancestors[0]
    return to_device(ancestors.T.float(), device)


def _checked(choices: Iterable[Sequence[int]], method: str) -> TreeChoices:
    try:
        paths = canonical(tuple(operator.index(rank) for rank in choice) for choice in choices)
    except TypeError as error:
        raise ValueError(f"{method}: a static tree is a list of choices such as (0, 1): {error}.") from error
    if not paths:
        raise ValueError(f"{method}: a static tree needs at least one choice, got an empty list.")
    known = {(), *paths}
    for previous, path in zip(((), *paths), paths, strict=False):
        if not path or min(path) < 0:
            raise ValueError(f"{method}: {path} is not a choice; a choice is a non-empty tuple of ranks from 0.")
        if path == previous:
            raise ValueError(f"{method}: the static tree has the choice {path} twice.")
        if path[:-1] not in known:
            raise ValueError(f"{method}: the static tree has the choice {path} but not its parent {path[:-1]}.")
    return paths


def canonical(paths: Iterable[tuple[int, ...]]) -> TreeChoices:
    """The paths by depth, then by ranks: parents before children, siblings in the order of their ranks."""
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


@dataclass(frozen=True)
class Level:
    """The nodes at one depth that have children, and those children.

    Attributes:
        nodes: indices of these nodes in the tree.
        previous: place of each one's parent among the previous level's `nodes`.
        children: indices of the children in the tree.
        child_parents, child_ranks: place of each child's parent among `nodes`, and the child's rank there.
    """

    nodes: tuple[int, ...]
    previous: tuple[int, ...]
    children: tuple[int, ...]
    child_parents: tuple[int, ...]
    child_ranks: tuple[int, ...]


@lru_cache(maxsize=256)
def levels_of(tree: StaticTree) -> tuple[Level, ...]:
    """The nodes that must be run, depth by depth, the root first."""
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
    """Plan of the `nodes` of a tree that were run, without the root, which is committed already."""
    index = {0: ROOT_PARENT, **{node: i for i, node in enumerate(nodes)}}
    return TreePlan.from_parents([[index[tree.parents[node]] for node in nodes]])
