"""One tree of several drafts, and the probability of each of its nodes.

Where drafters propose different tokens after the same text, at most one of them is right. So their probabilities are
mixed with weights, which say whom to trust when one is sure and another is not. Where drafters agree, they are right
more often than either says. So mixed probabilities are calibrated, by who proposed the token.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

from hf_speculate.tree import ROOT_PARENT, TreeRow


_SMALLEST = 1e-4  # probability; smaller ones count as this
_STEEPEST = 8  # largest log-odds that calibration tells apart
_PRIOR_SHARE, _PRIOR_WEIGHT = 6, 4  # observations that a probability, and an equal weight, count as
_MEMORY = 400  # observations; beyond it old ones count less
_SURENESS = (0.3, 0.6, 0.85)  # probabilities of the best child that tell drafters' states apart

Sure = tuple[int | None, ...]
"""For each drafter, how sure it is after a text; None if it has no draft there."""
Children = Mapping[int, tuple[int, float]]
"""Tokens after a node, with the node of each and its probability given the node above."""


class DraftedRow:
    """One row's draft of one drafter, by node.

    Args:
        row: nodes of the draft.
        probabilities: probability of each node to be right.
    """

    def __init__(self, row: TreeRow, probabilities: Sequence[float]):
        self.row, self.probabilities = row, probabilities
        self._children: dict[int, dict[int, tuple[int, float]]] = {}
        for node, (token, parent) in enumerate(zip(row.token_ids, row.parents, strict=True)):
            if parent >= 0:
                share = min(probabilities[node] / max(probabilities[parent], _SMALLEST), 1.0)
                self._children.setdefault(parent, {})[token] = node, share

    @property
    def expected_length(self) -> float:
        """Number of nodes that will be accepted, by their probabilities."""
        return sum(self.probabilities) - 1

    def children(self, node: int | None) -> Children:
        return {} if node is None else self._children.get(node, {})


class Proposal(NamedTuple):
    """A token after a node of the merged tree.

    Attributes:
        token: the token.
        share: its mixed probability, given the node.
        drafting: whether each drafter has a draft there.
        nodes: its node in every drafter's tree, None for those that did not propose it.
    """

    token: int
    share: float
    drafting: tuple[bool, ...]
    nodes: tuple[int | None, ...]


@dataclass
class _Mean:
    """A running mean that forgets."""

    value: float
    weight: float

    def add(self, value: float) -> None:
        self.weight = min(self.weight + 1, _MEMORY)
        self.value += (value - self.value) / self.weight


@dataclass
class _Trials:
    """Proposals of a kind, and how many of them were right."""

    count: float = 0.0
    right: float = 0.0

    def add(self, is_right: bool) -> None:
        self.count += 1
        self.right += is_right
        if self.count > _MEMORY:
            self.count, self.right = self.count / 2, self.right / 2

    def share(self, before: float) -> float:
        """The share that is right. `before` is the probability without this experience."""
        return (self.right + _PRIOR_SHARE * before) / (self.count + _PRIOR_SHARE)


@dataclass
class Mixing:
    """Experience with drafts of several drafters, from the rounds of similar requests.

    Attributes:
        weights: weight of each drafter, by how sure all are.
        trials: proposals and how many were right, by who proposed them and the log-odds of the mixed probability.
    """

    weights: dict[Sure, list[_Mean]] = field(default_factory=dict)
    trials: defaultdict[Hashable, _Trials] = field(default_factory=lambda: defaultdict(_Trials))

    def merged(self, root: int, drafts: Sequence[DraftedRow | None], max_nodes: int) -> TreeRow:
        """The `max_nodes` most probable nodes of all drafts as one tree, best first; parents come first."""
        tokens, parents, values = [root], [ROOT_PARENT], [0.0]
        heap: list[tuple[float, int, int, int, tuple[int | None, ...]]] = []
        number = 0
        nodes: tuple[int | None, ...] = tuple(None if draft is None else 0 for draft in drafts)
        place, negative = 0, -1.0
        while True:
            for proposal in self._proposals(drafts, nodes):
                number += 1  # of equally probable nodes the first comes first
                probability = -negative * self._share(proposal)
                heapq.heappush(heap, (-probability, number, place, proposal.token, proposal.nodes))
            if not heap or len(tokens) > max_nodes:
                return TreeRow(tokens, parents, values)
            negative, _, parent, token, nodes = heapq.heappop(heap)
            place = len(tokens)
            tokens.append(token)
            parents.append(parent)
            values.append(math.log(max(-negative, _SMALLEST**2)))

    def learn(self, drafts: Sequence[DraftedRow | None], tokens: Sequence[int]) -> None:
        """Learns from a row's drafts and the tokens that came after the root."""
        nodes: tuple[int | None, ...] = tuple(None if draft is None else 0 for draft in drafts)
        for token in tokens:
            right = None
            for proposal in self._proposals(drafts, nodes):
                is_right = proposal.token == token
                self.trials[_kind(proposal)].add(is_right)
                right = proposal if is_right else right
            self._weigh(drafts, nodes, token)
            if right is None:
                return
            nodes = right.nodes

    def _proposals(self, drafts: Sequence[DraftedRow | None], nodes: Sequence[int | None]) -> Iterator[Proposal]:
        """The tokens that are proposed after the nodes of all drafters that stand for the same text."""
        children = _children(drafts, nodes)
        drafting = tuple(map(bool, children))
        weights = [mean.value for mean in self._weights(tuple(map(_sureness, children)))]
        total = sum(compress(weights, drafting))
        for token in dict.fromkeys(token for own in children for token in own):
            found = [own.get(token) for own in children]
            mixed = sum(weight * each[1] for weight, each in zip(weights, found, strict=True) if each is not None)
            yield Proposal(token, mixed / total, drafting, tuple(None if each is None else each[0] for each in found))

    def _share(self, proposal: Proposal) -> float:
        """The calibrated probability. That of a single drafter is calibrated already."""
        is_alone = sum(proposal.drafting) == 1
        return proposal.share if is_alone else self.trials[_kind(proposal)].share(proposal.share)

    def _weights(self, sure: Sure) -> list[_Mean]:
        if sure not in self.weights:
            self.weights[sure] = [_Mean(1 / len(sure), _PRIOR_WEIGHT) for _ in sure]
        return self.weights[sure]

    def _weigh(self, drafts: Sequence[DraftedRow | None], nodes: Sequence[int | None], token: int) -> None:
        """Moves the weights towards those that explain the token, where several drafters had a draft."""
        children = _children(drafts, nodes)
        sure = tuple(map(_sureness, children))
        if sum(level is not None for level in sure) < 2:
            return
        weights = self._weights(sure)
        worth = [
            mean.value * (own[token][1] if token in own else _SMALLEST) if own else 0.0
            for mean, own in zip(weights, children, strict=True)
        ]
        for mean, each in zip(weights, worth, strict=True):
            mean.add(each / sum(worth))


def _children(drafts: Sequence[DraftedRow | None], nodes: Sequence[int | None]) -> list[Children]:
    return [{} if draft is None else draft.children(node) for draft, node in zip(drafts, nodes, strict=True)]


def _kind(proposal: Proposal) -> Hashable:
    """Proposals of a kind are right as often."""
    share = min(max(proposal.share, _SMALLEST), 1 - _SMALLEST)
    steepness = round(math.log(share / (1 - share)))
    proposers = tuple(node is not None for node in proposal.nodes)
    return proposers, proposal.drafting, min(max(steepness, -_STEEPEST), _STEEPEST)


def _sureness(children: Children) -> int | None:
    best = max((share for _, share in children.values()), default=None)
    return None if best is None else sum(best >= bound for bound in _SURENESS)
