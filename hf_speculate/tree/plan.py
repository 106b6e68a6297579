"""The structure of a draft tree as a forward needs it, compiled once and shared by trees of equal structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional

from ..transfers import to_device


ROOT_PARENT = -1
PADDING_PARENT = -2


@dataclass(frozen=True, eq=False)
class TreePlan:
    """Depths and ancestor mask of a tree.

    Attributes:
        depths: int64 [R, N], distance from the root; 0 for padding. R is 1 (all rows share the plan) or B.
        ancestors: bool [R, N, N]; `ancestors[r, i, j]` is True if node i attends to node j (its ancestors and itself).
        max_depth: upper bound of `depths`, known on the host.
    """

    depths: Int[Tensor, "R N"]
    ancestors: Bool[Tensor, "R N N"]
    max_depth: int

    @property
    def num_nodes(self) -> int:
        return self.depths.shape[1]

    def bias(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The additive form of `ancestors` [R, N, N]: 0 where a node attends, the smallest number of `dtype`
        elsewhere."""
        cache = self.__dict__.setdefault("_bias", {})
        if (dtype, device) not in cache:
            with torch.inference_mode(False):  # cached with the plan, which other requests share
                cache[dtype, device] = additive(to_device(self.ancestors, device), dtype)
        return cache[dtype, device]

    def extended(self, parents: Int[Tensor, "R F"]) -> TreePlan:
        """The plan with F more nodes at the end, one level deeper than the last; cheaper than `from_tensor`.

        Args:
            parents: int64 [R, F], the new nodes' parents: indices of nodes at the deepest level.
        """
        num_rows, count = parents.shape
        seen = self.ancestors.gather(1, parents[..., None].expand(-1, -1, self.num_nodes))
        own = torch.eye(count, dtype=torch.bool, device=parents.device).expand(num_rows, -1, -1)
        ancestors = torch.cat([functional.pad(self.ancestors, (0, count)), torch.cat([seen, own], dim=2)], dim=1)
        depths = functional.pad(self.depths, (0, count), value=self.max_depth + 1)
        return TreePlan(depths=depths, ancestors=ancestors, max_depth=self.max_depth + 1)

    @staticmethod
    def of_siblings(num_rows: int, num_nodes: int, device: torch.device) -> TreePlan:
        """The plan of nodes that all have depth 0."""
        depths = torch.zeros(num_rows, num_nodes, dtype=torch.long, device=device)
        ancestors = torch.eye(num_nodes, dtype=torch.bool, device=device).expand(num_rows, -1, -1)
        return TreePlan(depths=depths, ancestors=ancestors, max_depth=0)

    @staticmethod
    def from_parents(parents: Sequence[Sequence[int]]) -> TreePlan:
        """The plan of a structure known on the host, one sequence of parents a row. The last 256 plans are kept."""
        return _plan_from_parents(tuple(tuple(row) for row in parents))

    @staticmethod
    def from_tensor(parents: Int[Tensor, "R N"], max_depth: int) -> TreePlan:
        """The plan of a structure that is on a device, computed by pointer doubling without host synchronisation."""
        num_rows, num_nodes = parents.shape
        ancestors = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(num_rows, 1, 1)
        jump = torch.where(parents < 0, torch.arange(num_nodes, device=parents.device, dtype=torch.long), parents)
        reach = 1
        while reach <= max_depth:
            ancestors = ancestors | ancestors.gather(1, jump.unsqueeze(-1).expand(-1, -1, num_nodes))
            jump = jump.gather(1, jump)
            reach *= 2
        depths = ancestors.sum(-1) - 1
        return TreePlan(depths=depths, ancestors=ancestors, max_depth=max_depth)


def additive(visible: Bool[Tensor, "*N"], dtype: torch.dtype) -> Tensor:
    """0 where `visible`, else the smallest number of `dtype`."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min)


def node_depths(parents: Sequence[int]) -> list[int]:
    """Distance of every node of a row from the root; 0 for padding."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # cached: the first caller's mode must not restrict later requests
def _plan_from_parents(parents: tuple[tuple[int, ...], ...]) -> TreePlan:
    all_depths, all_ancestors = [], []
    for row_parents in parents:
        ancestors: list[list[bool]] = []
        for node, parent in enumerate(row_parents):
            seen = list(ancestors[parent]) if parent >= 0 else [False] * len(row_parents)
            seen[node] = True
            ancestors.append(seen)
        all_depths.append(node_depths(row_parents))
        all_ancestors.append(ancestors)
    max_depth = max(map(max, all_depths))
    return TreePlan(
        depths=torch.tensor(all_depths, dtype=torch.long, device="cpu"),
        ancestors=torch.tensor(all_ancestors, dtype=torch.bool, device="cpu"),
        max_depth=max_depth,
    )
