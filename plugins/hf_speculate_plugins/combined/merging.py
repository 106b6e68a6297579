"""Trees of several drafters in one, the most probable nodes first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hf_speculate.tree import ROOT_PARENT, TreeRow


_SMALLEST = 1e-9  # a value is a logarithm

RowDraft = tuple[TreeRow, Sequence[float]]
"""Nodes of a row, and the probability of each to be right."""


def merge_row(root: int, drafts: Sequence[RowDraft], max_nodes: int) -> TreeRow:
    """One tree of all drafts of a row: equal paths become one node, as probable as the surer drafter says; the
    `max_nodes` most probable ones stay."""
    places: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    tokens, parents, found = [root], [ROOT_PARENT], [1.0]
    for row, probabilities in drafts:
        place = [0] * len(row.parents)
        for node, (token, parent) in enumerate(zip(row.token_ids, row.parents, strict=True)):
            if parent < 0:  # the root, padding
                continue
            above = place[parent]
            place[node] = merged = places.setdefault((above, token), len(tokens))
            if merged == len(tokens):
                tokens.append(token)
                parents.append(above)
                found.append(0.0)
            found[merged] = max(found[merged], probabilities[node])
    return TreeRow(tokens, parents, [value_of(probability) for probability in found]).best(max_nodes)


def value_of(probability: float) -> float:
    """Of a node, see `DraftTree`."""
    return math.log(max(probability, _SMALLEST))


def expected_length(row: TreeRow) -> float:
    """Nodes of a tree that will be accepted, by its values."""
    assert row.values is not None
    return sum(map(math.exp, row.values[1:]))
