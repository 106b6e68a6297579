"""The sight of the nodes of a tree, for forwards that can take it without a mask."""

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
    """Stands for the mask of a forward over whole trees behind entries that every node sees.

    Making a mask and finding out what it says takes a tenth of a small model's forward.

    Attributes:
        parents: of the nodes, one sequence a row.
        num_before: entries before the trees.
        make: makes the mask.
        is_made: whether it was needed.
    """

    parents: Sequence[Sequence[int]]
    num_before: int
    make: Callable[[], Any]
    is_made: bool = False

    def build(self) -> Any:
        """The mask, for a forward that needs one."""
        self.is_made = True
        return self.make()

    @property
    def num_nodes(self) -> int:
        """The number of nodes of each row."""
        return len(self.parents[0])

    def runs(self) -> tuple[Int[Tensor, " F"], Int[Tensor, "S 2"]]:
        """The entries that each node sees, as runs: its ancestors, itself and everything before the trees.

        Returns:
            int32, where the runs of each node begin (F is the number of all nodes and 1), and the runs, each from its
            first entry to its end.
        """
        offsets, behind, counts = _runs(tuple(map(tuple, self.parents)))
        return offsets, torch.add(behind, counts, alpha=self.num_before)


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # kept for later requests, which may be in another mode
def _runs(parents: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets as of `TreeMask.runs`, and of runs where they begin and end: how far behind the entries before the trees,
    and whether those count at all (0 for the beginning of the text)."""
    offsets, behind, counts = [0], [], []
    for of_row in parents:
        paths: list[list[int]] = []
        for node, parent in enumerate(of_row):
            paths.append([*(paths[parent] if parent >= 0 else ()), node])
            found = [[0, 0]]  # everything before
            for seen in paths[-1]:
                if found[-1][1] == seen:
                    found[-1][1] += 1
                else:
                    found.append([seen, seen + 1])
            behind += found
            counts += [[0, 1], *[[1, 1]] * (len(found) - 1)]
            offsets.append(len(behind))
    return tuple(torch.tensor(values, dtype=torch.int32) for values in (offsets, behind, counts))  # type: ignore[return-value]
