"""Visible ranges of the nodes of trees: the form of a mask that the kernel for packed weights reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor


Ranges = tuple[Int[Tensor, " F"], Int[Tensor, "S 2"]]
"""Two int32 tensors: the offsets of each node's ranges (F is the number of all nodes plus 1), and the ranges, each as
its first entry and its end."""


def ranges_of_trees(
    parents: Sequence[Sequence[int]], starts: Sequence[int], lengths: Sequence[int], num_prefix: int
) -> Ranges:
    """The visible ranges of each node: its row's text, its ancestors and itself.

    Args:
        parents: index of each node's parent, one sequence a row. Nodes are entries from `num_prefix` on.
        starts, lengths: first real entry of each row's text, and its end.
    """
    if not any(starts) and min(lengths) == num_prefix:  # every node sees the same text
        offsets, without_text, counts = _ranges_after_text(tuple(map(tuple, parents)))
        return offsets, torch.add(without_text, counts, alpha=num_prefix)
    offsets, ranges = [0], []
    for of_row, start, length in zip(parents, starts, lengths, strict=True):
        for path in _paths(of_row):
            ranges += _joined([start, length], (num_prefix + node for node in path))
            offsets.append(len(ranges))
    return _int32(offsets), _int32(ranges)


def _paths(parents: Sequence[int]) -> Iterator[list[int]]:
    """The ancestors of each node, root first, and the node itself."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
        yield paths[-1]


def _joined(first: list[int], entries: Iterator[int]) -> list[list[int]]:
    """Ranges of a first one and of entries after it, those that touch in one."""
    ranges = [first]
    for entry in entries:
        if ranges[-1][1] == entry:
            ranges[-1][1] += 1
        else:
            ranges.append([entry, entry + 1])
    return ranges


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # cached for later requests, which may run in another mode
def _ranges_after_text(parents: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets of the ranges of nodes that see the same text, and the ends of ranges without that text.

    The last tensor is 0 for an end at the beginning of the text, and 1 for an end after it.
    """
    offsets, ends, counts = [0], [], []
    for of_row in parents:
        for path in _paths(of_row):
            of_node = _joined([0, 0], iter(path))
            ends += of_node
            counts += [[0, 1], *[[1, 1]] * (len(of_node) - 1)]
            offsets.append(len(ends))
    return _int32(offsets), _int32(ends), _int32(counts)


def _int32(values: Sequence[int] | Sequence[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")
