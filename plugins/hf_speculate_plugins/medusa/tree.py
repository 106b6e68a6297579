"""The static tree that Medusa drafts: the best one for what is known of the heads' accuracies.

Source: arXiv:2401.10774, section 2.1.2 (tree attention) and 2.3.3 (optimised tree construction). A node is named by its
path, the ranks of its tokens under their parents: `(0, 2)` is the third best child of the root's best child.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_speculate.transfers import to_device
from hf_speculate.tree import ROOT_PARENT, TreePlan


Paths = tuple[tuple[int, ...], ...]

_MAX_RANKS = 10

# Top-1 accuracies of the five heads of medusa-vicuna-7b as Medusa's report gives them. Ranks below the first were not
# published: they are taken to fall with the square of the rank, which puts 75 to 90 % of a head's hits on ten ranks.
# A wrong guess costs acceptance, never text.
_TOP1 = (0.56, 0.32, 0.20, 0.15, 0.12)
ACCURACIES = tuple(tuple(top1 / (rank + 1) ** 2 for rank in range(_MAX_RANKS)) for top1 in _TOP1)


@dataclass(frozen=True)
class StaticTree:
    """A tree structure with ranks; node 0 is the root, node i + 1 is `paths[i]`.

    Attributes:
        paths: the path of every node but the root, parents before children, siblings in the order of their ranks.
    """

    paths: Paths

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]]) -> StaticTree:
        """The tree of these paths in any order."""
        return cls(tuple(sorted(map(tuple, paths), key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, depth: int) -> StaticTree:
        """The best token of each of the first `depth` heads."""
        return cls(tuple((0,) * length for length in range(1, depth + 1)))

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of every node, -1 for the root."""
        node_of = {(): 0, **{path: node for node, path in enumerate(self.paths, start=1)}}
        return (ROOT_PARENT, *(node_of[path[:-1]] for path in self.paths))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of ranks used at depth 1, 2, …"""
        depths = range(1, max(map(len, self.paths), default=0) + 1)
        return tuple(1 + max(path[-1] for path in self.paths if len(path) == depth) for depth in depths)

    @property
    def max_depth(self) -> int:
        return len(self.widths)

    @property
    def num_ranks(self) -> int:
        """Largest number of ranks used at any depth."""
        return max(self.widths, default=0)

    def cut(self, depth: int) -> StaticTree:
        """The same tree down to `depth`."""
        return self if depth >= self.max_depth else _cut(self, depth)


@lru_cache(maxsize=256)
def _cut(tree: StaticTree, depth: int) -> StaticTree:
    return StaticTree(tuple(path for path in tree.paths if len(path) <= depth))


def best_static_tree(accuracies: Sequence[Sequence[float]], max_nodes: int) -> StaticTree:
    """The tree of `max_nodes` nodes with the highest expected number of accepted tokens.

    The value of a node is the product of the accuracies on its path, the probability that all of it is accepted if
    heads are independent. No node is worth more than its parent. So it is optimal to add the best child of the tree so
    far, again and again.

    Args:
        accuracies: share of rounds in which the token of rank k of head d is right, `accuracies[d][k]`.
    """
    paths: list[tuple[int, ...]] = []
    within_reach: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while within_reach and len(paths) <= max_nodes:
        negative_value, parent = heapq.heappop(within_reach)
        paths.append(parent)
        for rank, accuracy in enumerate(accuracies[len(parent)] if len(parent) < len(accuracies) else ()):
            if accuracy > 0:
                heapq.heappush(within_reach, (negative_value * accuracy, (*parent, rank)))
    return StaticTree.of(paths[1:])  # without the root


class TreeTensors(NamedTuple):
    """A static tree on a device.

    Attributes:
        columns: int64 [N - 1], column of every node but the root in the heads' best tokens, `StaticTree.num_ranks` of
            each head, side by side.
        sums: float32 [N, N], matrix that turns values of nodes into values of their paths.
        parents: int64 [1, N], parent of every node.
    """

    columns: Int[Tensor, " n"]
    sums: Float[Tensor, "N N"]
    parents: Int[Tensor, "1 N"]


@lru_cache(maxsize=64)
def tree_tensors(tree: StaticTree, device: torch.device) -> TreeTensors:
    """The tensors of `tree` on a device, made once."""
    columns = [(len(path) - 1) * tree.num_ranks + path[-1] for path in tree.paths]
    with torch.inference_mode(False):  # other requests share them
        ancestors = TreePlan.from_parents([tree.parents]).ancestors[0]
        return TreeTensors(
            to_device(columns, device, torch.long),
            to_device(ancestors.T.float(), device),
            to_device([tree.parents], device),
        )
