"""Which tree pays best: expected tokens per second of candidate trees, from drafted rounds and a cost model.

Dynamic trees (a head or model that grows its tree where it is sure, branches of prompt lookup) are judged by *replay*:
rounds that were drafted wide and deep tell what every narrower, shallower and smaller tree would have accepted.
Static trees are computed from the acceptance by depth and rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .tree import PADDING_PARENT, node_depths


Path = tuple[int, ...]
# Seconds of verifying `nodes` draft nodes, of drafting to `depth` at `width`.
VerifySeconds = Callable[[int], float]
DraftSeconds = Callable[[int, int], float]


@dataclass(frozen=True)
class DraftedRound:
    """One row's round.

    Attributes:
        parents: of every node, -1 for the root; best nodes first.
        path: draft nodes that were accepted, from depth 1 on.
    """

    parents: tuple[int, ...]
    path: tuple[int, ...]

    @classmethod
    def of_row(cls, parents: Sequence[int], path: Sequence[int]) -> DraftedRound:
        """Without the padding of a ragged batch."""
        return cls(tuple(parent for parent in parents if parent != PADDING_PARENT), tuple(path))

    @cached_property
    def ranks(self) -> list[int]:
        """Rank of every node among its siblings."""
        ranks, children = [], [0] * len(self.parents)
        for parent in self.parents:
            ranks.append(children[parent] if parent >= 0 else 0)
            if parent >= 0:
                children[parent] += 1
        return ranks

    @cached_property
    def depths(self) -> list[int]:
        """Depth of every node."""
        return node_depths(self.parents)


@dataclass(frozen=True)
class Replay:
    """What a round would have been with a tree of a certain width and depth.

    Attributes:
        places: for every accepted node, the smallest number of draft nodes with which the tree has it.
        level_sizes: draft nodes down to depth 1, 2, ….
    """

    places: tuple[int, ...]
    level_sizes: tuple[int, ...]

    def accepted(self, nodes: int) -> int:
        return sum(place <= nodes for place in self.places)


def replayed(round_: DraftedRound, width: int, depth: int) -> Replay:
    """The round with trees as `width` and `depth` would have grown them (EAGLE-2's rule).

    Every level expands its `width` best nodes, each to its `width` best children, and the best of all make the tree.
    Candidates that the wide tree itself left out cannot come back: with trees much smaller than it there are none.
    """
    kept, expanded = {0}, [0] * (depth + 1)
    may_expand = {0}
    order: list[tuple[int, int]] = []
    for node, parent in enumerate(round_.parents):
        if parent < 0:
            continue
        level = round_.depths[node]
        if level > depth or parent not in may_expand or round_.ranks[node] >= width:
            continue
        kept.add(node)
        order.append((node, level))
        if expanded[level] < width:
            expanded[level] += 1
            may_expand.add(node)
    place = {node: index for index, (node, _) in enumerate(order, start=1)}
    places = []
    for node in round_.path[:depth]:
        if node not in kept:
            break
        places.append(place[node])
    # A node is in the tree of n nodes only if its ancestors are: they come first.
    return Replay(tuple(places), tuple(sum(level <= d for _, level in order) for d in range(1, depth + 1)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A tree and what is expected of it.

    Attributes:
        depth, width, nodes: its size (of a static tree what it has).
        choices: of a static tree.
        tokens: expected tokens a round, bonus token included.
        seconds: expected seconds a round.
    """

    depth: int
    width: int
    nodes: int
    tokens: float
    seconds: float
    choices: tuple[Path, ...] | None = None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def dynamic_plans(
    rounds: Sequence[DraftedRound],
    verify: VerifySeconds,
    draft: DraftSeconds,
    *,
    widths: Sequence[int],
    depths: Sequence[int],
    sizes: Sequence[int],
) -> Iterator[Plan]:
    """Every combination of width, depth and number of nodes, judged by replay. Costs follow the nodes that there are:
    a drafter may find fewer than it was asked for, and rounds without any cost a plain round."""
    for width in widths:
        for depth in depths:
            replays = [replayed(round_, width, depth) for round_ in rounds]
            for size in sizes:
                tokens = seconds = 0.0
                for replay in replays:
                    nodes = min(size, replay.level_sizes[-1])
                    tokens += 1 + replay.accepted(size)
                    seconds += verify(nodes) + draft(depth, width)
                yield Plan(
                    depth=depth,
                    width=width,
                    nodes=size,
                    tokens=tokens / len(replays),
                    seconds=seconds / len(replays),
                )


@dataclass
class RankTable:
    """Acceptance by depth and rank: how often the child of rank k of an accepted node at depth d was the right one."""

    trials: list[list[int]] = field(default_factory=list)
    hits: list[list[int]] = field(default_factory=list)

    def record(self, round_: DraftedRound) -> None:
        """Learns a round: for every accepted node with children in the tree, which of these was right, if any.

        A rank is on trial where it is in the tree. In trees that are grown where the drafter is sure, higher ranks
        are tried on other occasions than the first: their figures describe those.
        """
        children = [0] * len(round_.parents)
        for parent in round_.parents[1:]:
            children[parent] += 1
        for depth, node in enumerate((0, *round_.path)):
            if not children[node]:
                return
            right = round_.ranks[round_.path[depth]] if depth < len(round_.path) else None
            while len(self.trials) <= depth:
                self.trials.append([])
                self.hits.append([])
            trials, hits = self.trials[depth], self.hits[depth]
            for rank in range(children[node]):
                if rank == len(trials):
                    trials.append(0)
                    hits.append(0)
                trials[rank] += 1
                hits[rank] += rank == right

    def rates(self) -> list[list[float]]:
        """`rates[d][k]`."""
        pairs = zip(self.trials, self.hits, strict=True)
        return [[hit / trial for trial, hit in zip(t, h, strict=True)] for t, h in pairs]


def best_first(rates: Sequence[Sequence[float]], max_nodes: int) -> Iterator[tuple[Path, float]]:
    """Nodes of the best static trees with their values, one after the other: the first n are the best tree of n nodes.

    The value of a node is the product of the rates on its path, the probability that all of it is accepted if levels
    are independent; the expected length of a tree is 1 + the sum of its nodes' values. As no node is worth more than
    its parent, taking the best node within reach again and again is optimal for every n.
    Source: Medusa (arXiv:2401.10774), section 2.3.3.

    Args:
        rates: `rates[d][k]`, how often the child of rank k is right at depth d + 1.
    """
    reachable: list[tuple[float, Path]] = []

    def reach_children(parent: Path, value: float) -> None:
        for rank, rate in enumerate(rates[len(parent)] if len(parent) < len(rates) else ()):
            if rate > 0:
                heapq.heappush(reachable, (-value * rate, (*parent, rank)))

    reach_children((), 1.0)
    for _ in range(max_nodes):
        if not reachable:
            return
        negative_value, path = heapq.heappop(reachable)
        yield path, -negative_value
        reach_children(path, -negative_value)


def static_plans(
    rates: Sequence[Sequence[float]], verify: VerifySeconds, draft: DraftSeconds, *, max_nodes: int
) -> Iterator[Plan]:
    """The best static tree of every depth and number of nodes; the best of all trees is among them."""
    for depth in range(1, len(rates) + 1):
        choices: list[Path] = []
        tokens = 1.0
        for path, value in best_first(rates[:depth], max_nodes):
            choices.append(path)
            tokens += value
            deepest, width = max(map(len, choices)), 1 + max(choice[-1] for choice in choices)
            yield Plan(
                depth=deepest,
                width=width,
                nodes=len(choices),
                tokens=tokens,
                seconds=verify(len(choices)) + draft(deepest, width),
                choices=tuple(choices),
            )
