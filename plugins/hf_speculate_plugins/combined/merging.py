"""Trees of several drafters in one, ordered by how often such nodes were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_speculate.drafting import DraftSession
from hf_speculate.tree import ROOT_PARENT, DraftTree

from .history import AcceptanceHistory


PartDraft = tuple[int, DraftSession, DraftTree]
"""Part, session and tree of a part that drafted."""


@dataclass(frozen=True)
class MergedRow:
    """A row's tree, best node first.

    Attributes:
        expected_length: accepted tokens that are expected of it: the sum of its nodes' values.
    """

    tokens: list[int]
    parents: list[int]
    expected_length: float


def merge_row(
    row: int, root: int, history: AcceptanceHistory, drafts: Sequence[PartDraft], max_nodes: int
) -> MergedRow:
    """One tree of all drafts of a row: equal paths become one, the `max_nodes` nodes of highest value stay.

    Args:
        drafts: of every part that drafted.
    """
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    tokens, parents, depths, values = [root], [ROOT_PARENT], [0], [1.0]
    for part, session, tree in drafts:
        own_tokens, own_parents = tree.host.token_ids[row], tree.host.parents[row]
        own_values = history.values(part, session.confidence(row), own_parents)
        place = [0] * len(own_parents)
        for node in range(1, len(own_parents)):
            if own_parents[node] < 0:
                continue
            parent = place[own_parents[node]]
            place[node] = merged = nodes.setdefault((parent, own_tokens[node]), len(tokens))
            if merged == len(tokens):
                tokens.append(own_tokens[node])
                parents.append(parent)
                depths.append(depths[parent] + 1)
                values.append(0.0)
            values[merged] = max(values[merged], own_values[node])
    # A parent's value is never below its child's: with its smaller depth it comes first, and every beginning is a tree.
    kept = sorted(range(1, len(tokens)), key=lambda node: (-values[node], depths[node]))[:max_nodes]
    new = {0: 0} | {node: position for position, node in enumerate(kept, start=1)}
    return MergedRow(
        [root, *(tokens[node] for node in kept)],
        [ROOT_PARENT, *(new[parents[node]] for node in kept)],
        sum(values[node] for node in kept),
    )
