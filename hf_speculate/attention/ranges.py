"""A tree's attention mask that is built only if a forward needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass
class TreeMask:
    """A placeholder for the mask of a forward over whole trees after a prefix that every node sees.

    Building and decoding a real mask takes a tenth of a small model's forward.

    Attributes:
        parents: index of each node's parent, one sequence a row.
        num_before: number of cache entries before the trees.
        make: function that builds the mask.
        is_made: whether the mask was built.
    """

    parents: Sequence[Sequence[int]]
    num_before: int
    make: Callable[[], Any]
    is_made: bool = False

    def build(self) -> Any:
        """The real mask, for a forward that needs one."""
        self.is_made = True
        return self.make()

    @property
    def num_nodes(self) -> int:
        """Number of nodes of each row."""
        return len(self.parents[0])

    def visible_ranges(self) -> tuple[Int[Tensor, " F"], Int[Tensor, "S 2"]]:
        """The visible ranges of each node: everything before the trees, its ancestors and itself.

        Returns:
            Two int32 tensors: the offsets of each node's ranges (F is the number of all nodes plus 1), and the ranges,
            each as its first entry and its end.
        """
        offsets, behind, counts = _ranges(tuple(map(tuple, self.parents)))
        return offsets, torch.add(behind, counts, alpha=self.num_before)


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # cached for later requests, which may run in another mode
def _ranges(parents: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets as in `TreeMask.visible_ranges`, and the ends of ranges relative to the first node.

    The last tensor is 0 for an end at the beginning of the text, and 1 for an end after the prefix.
    """
    offsets, behind, counts = [0], [], []
    for of_row in parents:
        paths: list[list[int]] = []
        for node, parent in enumerate(of_row):
            paths.append([*(paths[parent] if parent >= 0 else ()), node])
            found = [[0, 0]]  # the prefix
            for seen in paths[-1]:
                if found[-1][1] == seen:
                    found[-1][1] += 1
                else:
                    found.append([seen, seen + 1])
            behind += found
            counts += [[0, 1], *[[1, 1]] * (len(found) - 1)]
            offsets.append(len(behind))
    return tuple(torch.tensor(values, dtype=torch.int32, device="cpu") for values in (offsets, behind, counts))  # type: ignore[return-value]
