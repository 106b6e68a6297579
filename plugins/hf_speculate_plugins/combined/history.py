"""How often the nodes of each drafter's trees were accepted, and how far beyond cheaper drafts they went."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from hf_speculate.tree import DraftTree, node_depths


_DECAY = 0.97  # a memory of about 30 rounds
_CARRIED_WEIGHT = 0.3  # of one text's acceptance for the next, which may be sampled otherwise
_PRIOR_WEIGHT = 2.0
_PRIOR_PER_DEPTH = 0.6
_PRIOR_RATE = 0.6  # of a part's next level, before anything was seen: so that every part gets a try


@dataclass
class _Counts:
    """Of the nodes of drafts of one confidence, by their index in the tree."""

    trials: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)

    def count(self, node: int, is_hit: bool) -> None:
        missing = node + 1 - len(self.trials)
        self.trials += [0.0] * missing
        self.hits += [0.0] * missing
        self.trials[node] = _DECAY * self.trials[node] + 1
        self.hits[node] = _DECAY * self.hits[node] + is_hit

    def value(self, node: int, depth: int) -> tuple[float, float]:
        """Share of hits, and the weight of that in rounds; half unknown ones are thought to be as their depth says."""
        prior, is_known = _PRIOR_PER_DEPTH**depth, node < len(self.trials)
        trials, hits = (self.trials[node], self.hits[node]) if is_known else (0.0, 0.0)
        weight = trials + _PRIOR_WEIGHT
        return (hits + _PRIOR_WEIGHT * prior) / weight, weight


@dataclass
class _Gains:
    """How much further than cheaper drafts a part's drafts go, level by level.

    Attributes:
        trials: rounds in which the level above was reached and this one was drafted.
        hits: those in which it was reached, `new` of them where no cheaper draft came so far.
    """

    trials: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)

    def count(self, reached: int, drafted: int, cheaper: int) -> None:
        missing = drafted - len(self.trials)
        for values in (self.trials, self.hits, self.new):
            values += [0.0] * missing
        for level in range(min(reached + 1, drafted)):
            is_hit = level < reached
            self.trials[level] = _DECAY * self.trials[level] + 1
            self.hits[level] = _DECAY * self.hits[level] + is_hit
            self.new[level] = _DECAY * self.new[level] + (is_hit and level >= cheaper)

    def expected(self, depth: int) -> list[float]:
        """Tokens beyond the cheaper drafts', of drafts to depth 1, 2, … `depth`."""
        gains, gain, probability, rate, share = [], 0.0, 1.0, _PRIOR_RATE, 1.0
        for level in range(depth):
            if level < len(self.trials):
                trials, hits, new = self.trials[level], self.hits[level], self.new[level]
                rate = (hits + _PRIOR_WEIGHT * rate) / (trials + _PRIOR_WEIGHT)
                share = (new + _PRIOR_WEIGHT * share) / (hits + _PRIOR_WEIGHT)
            probability *= rate
            gain += probability * share
            gains.append(gain)
        return gains

    def faded(self, weight: float) -> _Gains:
        return _Gains(*([weight * value for value in values] for values in (self.trials, self.hits, self.new)))


class AcceptanceHistory:
    """What is known of each part's drafts. Trees come best node first, so a node's index says what it is worth.

    Args:
        num_parts: drafters.
    """

    def __init__(self, num_parts: int):
        self._counts: list[dict[int, _Counts]] = [{} for _ in range(num_parts)]
        self._gains: dict[tuple[int, tuple[tuple[int, int], ...]], _Gains] = {}

    def carried(self) -> AcceptanceHistory:
        """For a new text, in a session of its own: what earlier texts taught, with less weight."""
        new = deepcopy(self)
        for by_confidence in new._counts:
            for counts in by_confidence.values():
                counts.trials = [_CARRIED_WEIGHT * value for value in counts.trials]
                counts.hits = [_CARRIED_WEIGHT * value for value in counts.hits]
        new._gains = {key: gains.faded(_CARRIED_WEIGHT) for key, gains in new._gains.items()}
        return new

    def learn(self, part: int, confidence: int, tree: DraftTree, row: int, tokens: Sequence[int]) -> int:
        """Learns what became of a row's draft, and returns how deep the text followed it.

        Nodes below the last token that is known say nothing yet.

        Args:
            part, confidence: whose draft it was, and how sure of it that was (`DraftSession.confidence`).
            tokens: what was emitted after the root.
        """
        counts = self._counts[part].setdefault(confidence, _Counts())
        token_ids, parents = tree.host.token_ids[row], tree.host.parents[row]
        depths, length = node_depths(parents), 0
        on_path, unknown = {0}, set[int]()
        for node in range(1, len(parents)):
            parent = parents[node]
            if parent < 0:  # padding
                continue
            depth = depths[node]
            if parent in unknown or (parent in on_path and depth > len(tokens)):
                unknown.add(node)
            else:
                is_hit = parent in on_path and token_ids[node] == tokens[depth - 1]
                counts.count(node, is_hit)
                if is_hit:
                    on_path.add(node)
                    length = max(length, depth)
        return length

    def learn_gain(
        self, part: int, cheaper: tuple[tuple[int, int], ...], *, reached: int, drafted: int, before: int
    ) -> None:
        """Learns how far the text followed a draft of `part`, beside drafts of cheaper parts.

        Args:
            cheaper: these parts, each with its draft's confidence.
            reached: depth to which it did.
            drafted: depth to which it might have.
            before: depth to which the text followed the cheaper drafts.
        """
        self._gains.setdefault((part, cheaper), _Gains()).count(reached, drafted, before)

    def expected_gains(self, part: int, cheaper: tuple[tuple[int, int], ...], depth: int) -> list[float]:
        """Tokens a row that `part` is expected to bring beside such drafts (`learn_gain`), at depth 1, 2, … `depth`."""
        return self._gains.get((part, cheaper), _Gains()).expected(depth)

    def values(self, part: int, confidence: int, parents: Sequence[int]) -> list[float]:
        """Estimated probability of every node of a tree to be accepted (1 for the root), never rising: a part's own
        order, in which it put what it was surest of first, says more than the few rounds that are remembered."""
        counts = self._counts[part].get(confidence) or _Counts()
        depths = node_depths(parents)
        known = [
            counts.value(node, depths[node]) if parent >= 0 else (float(not node), 1.0)  # the root, padding
            for node, parent in enumerate(parents)
        ]
        return falling([value for value, _ in known], [weight for _, weight in known])


def falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The never rising sequence nearest to `values` (weighted least squares, by pooling adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        length = 1
        while pools and pools[-1][0] < value:
            mean, other, count = pools.pop()
            value = (mean * other + value * weight) / (other + weight)
            weight, length = weight + other, length + count
        pools.append((value, weight, length))
    return [mean for mean, _, length in pools for _ in range(length)]
