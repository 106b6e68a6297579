"""How much to draft: the budget of every round, chosen from measured costs and measured acceptance; or nothing.

The nodes of a tree come best first (`DraftTree`), so its first n nodes are the drafter's tree of n nodes: a round with
a wide tree tells what every smaller and shallower one would have accepted. Costs are measured on the rounds themselves.
A round gets the budget with the highest expected tokens per second. Where that is no draft at all, drafts are still
tried now and then, as often as a fixed share of the time pays for: `Tuner` never spends more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel


# Sizes of trees between which the tuner chooses (draft nodes, the root not counted).
LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)

_ACCEPTANCE_DECAY = 0.93  # a memory of about 14 rounds
_PRIOR_HAZARD = 0.7  # before anything was seen: optimistic, so that drafts get a try
_COST_WEIGHT = 0.2
_COST_SURPRISE = 0.1  # a longer or shorter time counts as this much off: times have stray values on one side
_PRIOR_COST_PER_NODE = 0.02  # of a one-token forward
_CARRIED_WEIGHT = 0.3  # of one text's acceptance for the next
_EXPLORE_EVERY = 16  # rounds: then one is wider than what is known to be best
_EXPLORED_ROUNDS = 2  # with everything the drafter has, before the first choice

# What speculation may lose against plain decoding: a share of the time, and a start in one-token forwards.
LOSS_SHARE = 0.01
LOSS_START = 2.0


@dataclass(frozen=True)
class Budget:
    """What a round may draft.

    Attributes:
        max_nodes: draft nodes a row, the root not counted; None for what the drafter gives.
        max_depth: likewise.
    """

    max_nodes: int | None = None
    max_depth: int | None = None


UNLIMITED = Budget()
NOTHING = Budget(0, 0)


class Timings:
    """Seconds as a function of a size, from observations at some sizes: robust averages, linear in between.

    Args:
        slope: relative rise per unit of size that is assumed beyond what was observed.
    """

    def __init__(self, slope: float):
        self._slope = slope
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def __contains__(self, size: int) -> bool:
        return size in self._seconds

    def __bool__(self) -> bool:
        return bool(self._seconds)

    def record(self, size: int, seconds: float) -> None:
        """Learns one observation.

        The first ones may hold a warm-up: the shortest of three counts. Later ones move an estimate of the median, and
        that of all other sizes half as far: what slows one (a longer context) slows all.
        """
        # Tables are replaced, never changed: other threads may be reading them.
        count = self._counts.get(size, 0) + 1
        self._counts = {**self._counts, size: count}
        known = self._seconds.get(size)
        if known is None or count <= 3:
            self._seconds = {**self._seconds, size: seconds if known is None else min(known, seconds)}
        else:
            surprise = seconds / max(known, 1e-9) - 1
            ratio = 1 + _COST_WEIGHT * max(min(surprise, _COST_SURPRISE), -_COST_SURPRISE)
            scaled = {other: value * ratio for other, value in self._seconds.items()}
            self._seconds = {**scaled, size: scaled[size] * ratio}

    def at(self, size: int) -> float:
        """Estimated seconds at `size`; needs one observation at least. Never falls as `size` rises."""
        sizes = sorted(self._seconds)
        values: list[float] = []
        for known in sizes:
            values.append(max(self._seconds[known], values[-1] if values else 0.0))
        position = bisect_left(sizes, size)
        if position < len(sizes) and sizes[position] == size:
            return values[position]
        if position == 0:
            return values[0] * (1 + self._slope * size) / (1 + self._slope * sizes[0])
        low, low_value = sizes[position - 1], values[position - 1]
        if position == len(sizes):
            return low_value * (1 + self._slope * size) / (1 + self._slope * low)
        share = (size - low) / (sizes[position] - low)
        return low_value + share * (values[position] - low_value)


@dataclass
class RoundCosts:
    """What a round costs on one target at one batch size: drafting by depth, everything else by nodes (root included).

    Shared by all calls of a speculator; `Tuner` reads and feeds it.
    """

    rounds: Timings = field(default_factory=lambda: Timings(_PRIOR_COST_PER_NODE))
    drafting: Timings = field(default_factory=lambda: Timings(1.0))

    def plain(self) -> float:
        """Seconds of a round without a draft."""
        return self.rounds.at(1)

    def drafted(self, num_nodes: int, depth: int) -> float:
        """Seconds of a round that drafts `num_nodes` nodes, the deepest at `depth`."""
        return self.rounds.at(num_nodes + 1) + (self.drafting.at(depth) if self.drafting else 0.0)


class Acceptance:
    """How far trees of every size on the ladder are accepted, from rounds of any size at least as wide.

    For every depth d and size n: the share of rounds whose path went on to depth d within the first n nodes, out of
    those where it had come to depth d - 1 within them. Old rounds fade. A path accepted to the end of its tree says
    nothing about the depth below (it is censored there).
    """

    def __init__(self) -> None:
        self.widest = self.deepest = 0  # of the trees that were seen
        self._trials: list[list[float]] = []  # [depth - 1][size]
        self._hits: list[list[float]] = []

    def record(self, path: Sequence[int], num_nodes: int, depth: int) -> None:
        """Learns one row's round.

        Args:
            path: indices of the accepted draft nodes, from depth 1 on.
            num_nodes: draft nodes of the row's tree.
            depth: of the deepest of them.
        """
        self.widest, self.deepest = max(self.widest, num_nodes), max(self.deepest, depth)
        while len(self._trials) < depth:
            self._trials.append([0.0] * len(LADDER))
            self._hits.append([0.0] * len(LADDER))
        observed = bisect_left(LADDER, num_nodes) + 1  # the size that holds the whole tree stands for it
        first = 0  # sizes below `first` have lost the path already
        for level in range(min(len(path) + 1, depth)):
            next_first = bisect_left(LADDER, path[level]) if level < len(path) else observed
            trials, hits = self._trials[level], self._hits[level]
            for size in range(first, min(observed, len(LADDER))):
                trials[size] = _ACCEPTANCE_DECAY * trials[size] + 1
                hits[size] = _ACCEPTANCE_DECAY * hits[size] + (size >= next_first)
            first = next_first

    def fade(self, weight: float) -> None:
        """Weakens what is known: something new may have begun."""
        for table in (self._trials, self._hits):
            for row in table:
                row[:] = [weight * value for value in row]

    @classmethod
    def average(cls, rows: Sequence[Acceptance]) -> Acceptance:
        """What the rows of a batch know together, with the weight of one of them."""
        new = cls()
        new.widest, new.deepest = max(row.widest for row in rows), max(row.deepest for row in rows)
        for level in range(max(len(row._trials) for row in rows)):
            known = [row for row in rows if level < len(row._trials)]
            for name in ("_trials", "_hits"):
                columns = zip(*(getattr(row, name)[level] for row in known), strict=True)
                getattr(new, name).append([sum(column) / len(known) for column in columns])
        return new

    def expected_lengths(self, size: int, max_depth: int) -> list[float]:
        """Expected tokens of a round, bonus token included, with the first `LADDER[size]` nodes cut to depth 1, 2, …"""
        lengths, reach, length, hazard = [], 1.0, 1.0, _PRIOR_HAZARD
        for level in range(max_depth):
            if level < len(self._trials):
                trials, hits = self._trials[level][size], self._hits[level][size]
                hazard = (hits + hazard) / (trials + 1)
            reach *= hazard
            length += reach
            lengths.append(length)
        return lengths


class Tuner:
    """Chooses the budget of every round of one request.

    Args:
        costs: of the target at this batch size.
        acceptances: one a row.
    """

    def __init__(self, costs: RoundCosts, acceptances: Sequence[Acceptance]):
        self.acceptances = acceptances
        self._costs = costs
        self._explored = _EXPLORED_ROUNDS if acceptances[0].widest else 0
        self._is_censored = False
        self._elapsed = 0.0
        self._loss = 0.0
        self._is_paused = False

    def choose(self, rows: Sequence[int]) -> Budget:
        """The budget of the next round, in which `rows` take part."""
        if self._explored < _EXPLORED_ROUNDS:
            return UNLIMITED if self._may_lose(0.0) else NOTHING
        if 1 not in self._costs.rounds:
            return NOTHING  # what plain decoding costs is yet to be seen
        budget, rate = self._best(rows)
        share_lost = 1 - rate * self._costs.plain() / len(rows)
        if share_lost > 0 and not self._may_lose(share_lost * self._seconds(budget)):
            self._is_paused = True
            return NOTHING
        if self._is_paused:  # what came meanwhile was not seen: what was seen before counts half
            for row in rows:
                self.acceptances[row].fade(0.5)
        self._is_paused = False
        if not self._may_lose(0.0):
            return NOTHING
        return self._wider(budget) if self._is_censored or self._explored % _EXPLORE_EVERY == 0 else budget

    def record(
        self,
        num_nodes: int,
        depth: int,
        paths: Mapping[int, Sequence[int]],
        *,
        seconds: float,
        drafting_seconds: float,
    ) -> None:
        """Learns what a round did.

        Args:
            num_nodes: draft nodes that were scored, a row (0: none were drafted).
            depth: how deep the drafter went.
            paths: accepted draft nodes of each row that took part, from depth 1 on.
            seconds: the whole round; `drafting_seconds` of these went into the draft.
        """
        costs = self._costs
        costs.rounds.record(num_nodes + 1, seconds - drafting_seconds)
        self._elapsed += seconds
        if num_nodes == 0 or not paths:
            return
        costs.drafting.record(depth, drafting_seconds)
        self._explored += 1
        for row, path in paths.items():
            self.acceptances[row].record(path, num_nodes, depth)
        tokens = 1 + sum(map(len, paths.values())) / len(paths)
        deepest = max(acceptance.deepest for acceptance in self.acceptances)
        self._is_censored = depth < deepest and tokens - 1 >= depth - 0.5  # most rows were accepted to the end
        self._loss = max(self._loss + seconds - tokens * costs.plain(), 0.0)

    def _may_lose(self, seconds: float) -> bool:
        if not self._costs.rounds:
            return True
        return self._loss + seconds <= LOSS_SHARE * self._elapsed + LOSS_START * self._costs.plain()

    def _wider(self, budget: Budget) -> Budget:
        """What a round must draft to tell whether more than `budget` would be accepted."""
        assert budget.max_nodes is not None
        assert budget.max_depth is not None
        return Budget(2 * budget.max_nodes + 1, budget.max_depth + 2)

    def _seconds(self, budget: Budget) -> float:
        return self._costs.drafted(budget.max_nodes or 1, budget.max_depth or 1)

    def _best(self, rows: Sequence[int]) -> tuple[Budget, float]:
        """The budget with the highest expected tokens per second, and these."""
        best, best_rate, smaller = NOTHING, 0.0, []
        widest, deepest = (max(getattr(a, name) for a in self.acceptances) for name in ("widest", "deepest"))
        for size in range(min(bisect_left(LADDER, widest) + 1, len(LADDER))):
            num_nodes = min(LADDER[size], widest)
            lengths = [self.acceptances[row].expected_lengths(size, min(deepest, num_nodes)) for row in rows]
            totals = [sum(column) for column in zip(*lengths, strict=True)]
            # More nodes accept no less; what was seen of them may be older.
            smaller = [max(pair) for pair in zip(totals, smaller, strict=False)] + totals[len(smaller) :]
            for depth, expected in enumerate(smaller, start=1):
                budget = Budget(num_nodes, depth)
                rate = expected / self._seconds(budget)
                if rate > best_rate:
                    best, best_rate = budget, rate
        return best, best_rate


class Experience:
    """What a speculator has learnt about its targets; targets that are gone are forgotten."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[PreTrainedModel, _Known] = WeakKeyDictionary()

    def tuner(self, target: PreTrainedModel, batch_size: int) -> Tuner:
        """For one request; it begins with what earlier ones taught."""
        known = self._known.setdefault(target, _Known())
        costs = known.costs.setdefault(batch_size, RoundCosts())
        return Tuner(costs, [Acceptance.average([known.acceptance]) for _ in range(batch_size)])

    def learn(self, target: PreTrainedModel, tuner: Tuner) -> None:
        """Keeps what a finished request taught about acceptance, for what the next text is worth."""
        acceptance = Acceptance.average(tuner.acceptances)
        acceptance.fade(_CARRIED_WEIGHT)
        self._known[target].acceptance = acceptance


@dataclass
class _Known:
    costs: dict[int, RoundCosts] = field(default_factory=dict)
    acceptance: Acceptance = field(default_factory=Acceptance)
