"""How often the nodes of each drafter's trees were accepted, and trees merged by it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from hf_speculate.drafter import DraftSession
from hf_speculate.tree import ROOT_PARENT, DraftTree, node_depths


_DECAY = 0.97  # a memory of about 30 rounds
_CARRIED_WEIGHT = 0.3  # of one text's acceptance for the next, which may be sampled otherwise
_PRIOR_WEIGHT = 2.0
_PRIOR_PER_DEPTH = 0.6
_PRIOR_GAIN = 1.5  # tokens: so that every part gets a try
_GAIN_SMOOTHING = 0.1


@dataclass
class _Counts:
    """Of the nodes of one kind of draft, by their index in the tree."""

    trials: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)

    def record(self, node: int, is_hit: bool) -> None:
        missing = node + 1 - len(self.trials)
        self.trials += [0.0] * missing
        self.hits += [0.0] * missing
        self.trials[node] = _DECAY * self.trials[node] + 1
        self.hits[node] = _DECAY * self.hits[node] + is_hit

    def value(self, node: int, depth: int) -> float:
        prior = _PRIOR_PER_DEPTH**depth
        if node >= len(self.trials):
            return prior
        return (self.hits[node] + _PRIOR_WEIGHT * prior) / (self.trials[node] + _PRIOR_WEIGHT)


class Ledger:
    """What is known of each part's drafts. Trees come best node first, so a node's index says what it is worth.

    Args:
        num_parts: drafters.
    """

    def __init__(self, num_parts: int):
        self._counts: list[dict[int, _Counts]] = [{} for _ in range(num_parts)]
        self._gains: dict[tuple[int, tuple[tuple[int, int], ...]], float] = {}

    def carried(self) -> Ledger:
        """For a new text, in a session of its own: what earlier texts taught, with less weight."""
        new = deepcopy(self)
        for kinds in new._counts:
            for counts in kinds.values():
                counts.trials = [_CARRIED_WEIGHT * value for value in counts.trials]
                counts.hits = [_CARRIED_WEIGHT * value for value in counts.hits]
        new._gains = {key: _PRIOR_GAIN + _CARRIED_WEIGHT * (gain - _PRIOR_GAIN) for key, gain in new._gains.items()}
        return new

    def record(self, part: int, grade: int, tree: DraftTree, row: int, tokens: Sequence[int]) -> int:
        """Learns what became of a row's draft, and returns how deep the text followed it.

        Nodes below the last token that is known say nothing yet.

        Args:
            part, grade: whose draft it was, and of which kind (`DraftSession.grade`).
            tokens: what was emitted after the root.
        """
        counts = self._counts[part].setdefault(grade, _Counts())
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
                counts.record(node, is_hit)
                if is_hit:
                    on_path.add(node)
                    length = max(length, depth)
        return length

    def record_gain(self, part: int, cheaper: tuple[tuple[int, int], ...], tokens: int) -> None:
        """Learns how many tokens `part` brought beyond what the cheaper parts drafted, of the grades `cheaper`."""
        known = self.expected_gain(part, cheaper)
        self._gains[part, cheaper] = known + _GAIN_SMOOTHING * (tokens - known)

    def expected_gain(self, part: int, cheaper: tuple[tuple[int, int], ...]) -> float:
        """Tokens a row that `part` is expected to bring beside drafts of these grades."""
        return self._gains.get((part, cheaper), _PRIOR_GAIN)

    def values(self, part: int, grade: int, parents: Sequence[int]) -> list[float]:
        """Estimated probability of every node of a tree to be accepted (1 for the root), never above its parent's."""
        counts = self._counts[part].get(grade) or _Counts()
        values, depths = [1.0] * len(parents), node_depths(parents)
        for node in range(1, len(parents)):
            parent = parents[node]
            if parent >= 0:
                values[node] = min(counts.value(node, depths[node]), values[parent])
        return values


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
    row: int, root: int, ledger: Ledger, drafts: Sequence[tuple[int, DraftSession, DraftTree]], max_nodes: int
) -> MergedRow:
    """One tree of all drafts of a row: equal paths become one, the `max_nodes` nodes of highest value stay.

    Args:
        drafts: part, session and tree of every part that drafted.
    """
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    tokens, parents, depths, values = [root], [ROOT_PARENT], [0], [1.0]
    for part, session, tree in drafts:
        own_tokens, own_parents = tree.host.token_ids[row], tree.host.parents[row]
        own_values = ledger.values(part, session.grade(row), own_parents)
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
