"""Draft trees within a grammar: forbidden nodes are dropped, and forced continuations are added below the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hf_speculate.tree import ROOT_PARENT, TreeRow

from .guides import Guide
from .style import IsText, Style, longer


# Smallest probability of an added path, and largest number of children that a node gets.
_FLOOR, _MOST_CHILDREN = 0.05, 3


class Growth:
    """Grows one row's tree by walking a guide over it.

    Args:
        most: largest number of nodes to add.
    """

    def __init__(self, guide: Guide, style: Style, is_text: IsText, max_depth: int, most: int):
        self._guide, self._style, self._is_text = guide, style, is_text
        self._max_depth, self._most = max_depth, most

    def grown(self, row: TreeRow, last: Sequence[int]) -> TreeRow:
        """The tree with its allowed nodes and the added ones.

        Args:
            last: last tokens of the text, up to the root.
        """
        assert row.values is not None
        self._tokens, self._parents, self._values = [row.token_ids[0]], [ROOT_PARENT], [row.values[0]]
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(row.parents):
            children.setdefault(parent, []).append(node)
        self._row, self._children, self._num_added = row, children, 0
        self._visit(0, 0, list(last), 0)
        return TreeRow(self._tokens, self._parents, self._values)

    def _visit(self, place: int, drafted: int | None, last: list[int], depth: int) -> None:
        """Adds everything below a node to the new tree.

        Args:
            place: index of the node in the new tree.
            drafted: its index in the given tree; None if it was added.
        """
        if depth >= self._max_depth:
            return
        value, row = self._values[place], self._row
        wanted = {}
        for token, prob in self._style.proposals(self._guide.possible(), last, self._is_text)[:_MOST_CHILDREN]:
            wanted[token] = value + math.log(prob)
        drafts = {} if drafted is None else {row.token_ids[node]: node for node in self._children.get(drafted, ())}
        for token, node in drafts.items():
            assert row.values is not None
            wanted[token] = max(wanted.get(token, -math.inf), min(row.values[node], value))
        for token, token_value in sorted(wanted.items(), key=lambda item: -item[1]):
            is_added = token not in drafts
            if is_added and (token_value < math.log(_FLOOR) or self._num_added >= self._most):
                continue
            if not self._guide.accept(token):
                continue
            self._num_added += is_added
            self._tokens.append(token)
            self._parents.append(place)
            self._values.append(token_value)
            self._visit(len(self._tokens) - 1, drafts.get(token), longer(last, token), depth + 1)
            self._guide.back()
