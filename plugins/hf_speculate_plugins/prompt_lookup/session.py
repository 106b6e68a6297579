"""One request of prompt lookup: an index a row, which grows with the text."""

from __future__ import annotations

import math

from hf_speculate.drafting import DraftRequest, DraftSession, DraftState
from hf_speculate.tree import ROOT_PARENT, DraftTree, TreeRow

from .index import SuffixIndex
from .options import PromptLookupOptions


class PromptLookupSession(DraftSession):
    """One index a row."""

    def __init__(self, options: PromptLookupOptions, request: DraftRequest):
        self.options = options
        self._indices = []
        for text in request.row_texts:
            index = SuffixIndex(options.min_ngram, options.max_ngram)
            index.extend(text)
            self._indices.append(index)
        self._has_seen_prompt = False

    def observe(self, tokens, features, lengths) -> None:
        for index, row, length in zip(self._indices, tokens.tolist(), lengths.tolist(), strict=True):
            # The prompt is in the index already; what is new is the token after its last position.
            index.extend(row[:length] if self._has_seen_prompt else row[length - 1 : length])
        self._has_seen_prompt = True

    def draft(self, state: DraftState) -> DraftTree:
        rows = []
        for index, root, is_active in zip(self._indices, state.root_ids.tolist(), state.active, strict=True):
            rows.append(self._draft_row(index, root, state) if is_active else TreeRow([root], [ROOT_PARENT], [0.0]))
        return DraftTree.from_rows(rows)

    def _draft_row(self, index: SuffixIndex, root: int, state: DraftState) -> TreeRow:
        options = self.options
        depth = min(options.depth, state.max_depth)
        tokens, parents, shares = [root], [ROOT_PARENT], [1.0]
        branches, rest = 1 if state.chains_only else options.branches, 1.0
        for match_size, start in index.continuations(branches):
            node = 0
            for copied, token in enumerate(index.tokens[start : start + depth]):
                child = _find_child(tokens, parents, node, token)
                if child is None:
                    if len(tokens) > options.max_nodes:
                        break
                    child = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                    shares.append((shares[node] if node else rest) * _share_right(match_size + copied))
                node = child
            rest *= 1 - _share_right(match_size)  # of the root's children one at most is right
        return TreeRow(tokens, parents, [math.log(share) for share in shares])


def _share_right(match_size: int) -> float:
    """How often what followed so many equal tokens follows again: a guess, of which the order matters."""
    return match_size / (match_size + 1)


def _find_child(tokens: list[int], parents: list[int], node: int, token: int) -> int | None:
    return next((i for i in range(node + 1, len(tokens)) if parents[i] == node and tokens[i] == token), None)
