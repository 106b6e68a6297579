"""Drafts by counts, as SuffixDecoding makes them (Oliaro et al., arXiv:2411.04975; arctic-inference 0.3.0)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from .counts import Node, WindowCounts
from .drafts import Draft, single


# What keeps a budget of n from becoming n - 1 where the product is a hair below it.
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class MatchRule:
    """How much is drafted after a match.

    Attributes:
        max_tokens: draft nodes at most.
        factor, offset: a match of m tokens is worth `m * factor + offset` nodes.
        floor: smallest probability of a path.
        tree: several continuations side by side; else the most frequent one.
        max_depth: of a node; None: no limit but the trie's.
    """

    max_tokens: int
    factor: float = 1.0
    offset: float = 0.0
    floor: float = 0.1
    tree: bool = True
    max_depth: int | None = None

    def budget(self, match_len: int) -> int:
        return max(0, min(self.max_tokens, int(match_len * self.factor + self.offset + _ROUNDING)))


def best_draft(counts: WindowCounts, context: Sequence[int], rule: MatchRule) -> Draft:
    """Of the drafts after every match of the context's end, the one of the highest score; of equal ones, the longest
    match's.

    Args:
        context: the end of the text; a match is shorter than it, and than `counts.depth`.
    """
    best = Draft()
    context = context[-counts.depth :]
    for match_len in range(1, len(context)):
        node = counts.find(context[-match_len:])
        if node is None:
            break
        draft = Draft(match_len=match_len)
        (_grow_tree if rule.tree else _grow_path)(draft, node, rule)
        if draft.score >= best.score:
            best = draft
    return best


def _grow_path(draft: Draft, node: Node, rule: MatchRule) -> None:
    parent, prob = -1, 1.0
    for _ in range(min(rule.budget(draft.match_len), _max_depth(rule))):
        if not node.children:
            break
        token, child = max(node.children.items(), key=lambda item: item[1].count)
        prob = single(single(prob * child.count) / node.count)
        if prob < rule.floor:
            break
        parent = draft.add(token, parent, prob)
        node = child


def _grow_tree(draft: Draft, node: Node, rule: MatchRule) -> None:
    budget, max_depth, num_pushed = rule.budget(draft.match_len), _max_depth(rule), 0
    heap: list[tuple[float, int, int, int, int, Node]] = []

    def push_children(node: Node, index: int, prob: float, depth: int) -> None:
        nonlocal num_pushed
        for token, child in node.children.items() if depth < max_depth else ():
            share = single(single(prob * child.count) / node.count)
            if share >= rule.floor:
                num_pushed += 1
                heapq.heappush(heap, (-share, num_pushed, index, token, depth + 1, child))

    push_children(node, -1, 1.0, 0)
    while heap and len(draft.tokens) < budget:
        negative, _, parent, token, depth, child = heapq.heappop(heap)
        push_children(child, draft.add(token, parent, -negative), -negative, depth)


def _max_depth(rule: MatchRule) -> int:
    return rule.max_tokens if rule.max_depth is None else rule.max_depth
