"""Counts of every window of a text, in a trie."""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


_SINGLE = struct.Struct("f")


@dataclass
class Draft:
    """Nodes below the last token of a text, best first, parents first.

    Attributes:
        tokens: of the draft nodes.
        parents: index of each node's parent, -1 for the last token of the text.
        probs: of each node's path.
        match_len: tokens of the context that were found, where one match makes a draft.
        score: sum of the probabilities: how many nodes would be accepted. In single precision, as the original's:
            which match wins where two are equally good hangs on how that is rounded.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    match_len: int = 0
    score: float = 0.0

    def add(self, token: int, parent: int, prob: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.score = single(self.score + prob)
        return len(self.tokens) - 1


def best_of(drafts: Iterable[Draft]) -> Draft:
    """The draft of the highest score, of equal ones the first."""
    return max(drafts, key=lambda draft: draft.score)


def single(value: float) -> float:
    """Rounded to single precision."""
    return _SINGLE.unpack(_SINGLE.pack(value))[0]


class Node:
    """A window of tokens, from the root down.

    Attributes:
        count: its occurrences.
        children: the windows that are one token longer, by that token.
    """

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node] = {}


class WindowCounts:
    """The windows of at most `depth` tokens of some texts. A token costs `depth` steps, to add or to remove."""

    def __init__(self, depth: int):
        self.depth = depth
        self.root = Node()

    def extend(self, cursor: list[Node], tokens: Iterable[int]) -> None:
        """Appends tokens to a text.

        Args:
            cursor: where the text ends: the windows that can still grow, longest first. Empty for a new text; changed.
        """
        for token in tokens:
            cursor.append(self.root)
            del cursor[: -self.depth]
            for place, node in enumerate(cursor):
                child = node.children.get(token)
                if child is None:
                    child = node.children[token] = Node()
                child.count += 1
                cursor[place] = child

    def remove(self, tokens: Sequence[int]) -> None:
        """Takes back a whole text."""
        for start in range(len(tokens)):
            node = self.root
            for token in tokens[start : start + self.depth]:
                child = node.children[token]
                child.count -= 1
                if not child.count:
                    del node.children[token]  # what is longer has occurred in this text only
                    break
                node = child

    def find(self, tokens: Sequence[int]) -> Node | None:
        """The window, None where it does not occur."""
        node: Node | None = self.root
        for token in tokens:
            node = node.children.get(token)
            if node is None:
                return None
        return node


# What keeps a budget of n from becoming n - 1 where the product is a hair below it.
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class MatchRule:
    """The amount that is drafted after a match.

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
    """The draft of the highest score among those after every match of the context's end; of equal ones, the longest
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
