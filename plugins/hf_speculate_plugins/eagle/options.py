"""How much an EAGLE head drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..trees import StaticTree
from .levels import levels_of


# The steps' noise lifts tokens that the head finds less probable: sampled requests gain by more children (SmolLM2, 48
# held-out questions, 8 / 16 / 32 nodes: 1 %, 1.5 %, 4 % more tokens a round), greedy ones do not.
_GREEDY_WIDTH, _SAMPLED_WIDTH = 4, 8


@dataclass(frozen=True)
class TreeSize:
    """Of one dynamic tree.

    Attributes:
        depth: levels, at least 1.
        width: nodes of a level that are run, and children of each.
        max_nodes: draft nodes, the root not counted.
    """

    depth: int
    width: int
    max_nodes: int


@dataclass(frozen=True, kw_only=True)
class EagleOptions:
    """Options of EAGLE drafting.

    Attributes:
        depth: tokens drafted along a branch; each costs one forward of the head.
        top_k: 1 drafts a chain, more a dynamic tree with that many branches a level; None: 4, and 8 for requests that
            sample.
        max_nodes: draft nodes of a dynamic tree, the root not counted. (SafeAILab's `total_token` counts it, and its
            `depth` counts the levels below the first: total_token=60, depth=7 are max_nodes=59, depth=8 here.)
        tree: a static tree instead, as a list of paths of ranks, e.g. `[(0,), (1,), (0, 0)]`.
    """

    depth: int = 8
    top_k: int | None = None
    max_nodes: int = 24
    tree: StaticTree | Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "max_nodes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"eagle: {name} must be at least 1, got {value}.")
        if self.tree is not None and not isinstance(self.tree, StaticTree):
            object.__setattr__(self, "tree", StaticTree.of(self.tree, "eagle"))

    @property
    def static_tree(self) -> StaticTree | None:
        return self.tree if isinstance(self.tree, StaticTree) else None

    @property
    def max_depth(self) -> int:
        """Depth of a chain, or of what a static tree is cut to where only chains can be verified."""
        return self.depth if self.static_tree is None else self.static_tree.max_depth

    def width(self, samples: bool) -> int:
        """Branches of a level, for a request that samples or not."""
        return self.top_k or (_SAMPLED_WIDTH if samples else _GREEDY_WIDTH)

    @property
    def max_frontier(self) -> int:
        """Nodes of a level that are run at once, at the most."""
        tree = self.static_tree
        return self.width(samples=True) if tree is None else max(len(level.nodes) for level in levels_of(tree))
