"""The adaptive policy: the budget of every round, chosen from measured costs and measured acceptance; or nothing.

The nodes of a tree come best first (`DraftTree`), so its first n nodes are the drafter's tree of n nodes: a round with
a wide tree tells what every smaller and shallower one would have accepted. Costs are measured on the rounds themselves;
an estimate of the first ones is corrected by those that follow.
A round gets the budget with the highest expected tokens per second. Where that is no draft at all, drafts are still
tried now and then, as often as a fixed share of the time pays for: the policy never spends more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..round import Round
from .contract import NOTHING, Budget, DraftPolicy, PolicyRequest, PolicySession, Situation
from .costs import RoundCosts
from .rates import LADDER, AcceptanceRates


_CARRIED_WEIGHT = 0.3  # of one text's acceptance for the next
_EXPLORE_EVERY = 16  # rounds: then one is wider than what is known to be best
_PLAN_EVERY = 4  # rounds: planning takes about a hundredth of a small model's round
_PLAN_SURPRISE = 1.5  # a round that takes so many times what it was planned to take calls for a new plan
# Nodes and depth of the first rounds, before anything can be chosen. All that a drafter has may take as long as several
# tokens: where it comes to nothing, a short text would be over before that is made up for.
_FIRST_ROUNDS = ((8, 3), (16, 5))

# What speculation may lose against plain decoding: a share of the time, and a start in one-token forwards.
LOSS_SHARE = 0.01
LOSS_START = 5.0
# Of what it won, so many one-token forwards may be lost again: a few unlucky rounds do not stop what pays.
_BANK = 8.0


class AdaptiveSession(PolicySession):
    """Chooses the budget of every round of one request.

    Args:
        costs: of the target at this batch size.
        rates: one a row.
        chooses_depth: see `PolicyRequest`.
        known: what the request begins with, and leaves to the next.
    """

    def __init__(
        self,
        costs: RoundCosts,
        rates: Sequence[AcceptanceRates],
        chooses_depth: bool = True,
        known: _Known | None = None,
    ):
        self.rates = rates
        self._known = known
        self._costs = costs
        self._chooses_depth = chooses_depth
        self._costs_by_size = {len(rates): costs}
        self._explored = len(_FIRST_ROUNDS) if rates[0].widest else 0
        self._is_censored = False
        self._elapsed = 0.0
        self._loss = 0.0
        self._stake = 0.0  # what the next draft may lose, while there is none because that is too much
        self._context = 0
        self._plan: tuple[Budget, float, float] | None = None
        self._plan_rows: Sequence[int] = ()
        self._plan_context = 0
        self._plan_age = 0

    def choose(self, situation: Situation) -> Budget:
        self._run(situation.num_scored)
        context, rows = situation.context, situation.rows
        self._context = context
        if self._explored < len(_FIRST_ROUNDS):
            return self._sized(*_FIRST_ROUNDS[self._explored]) if self._may_lose(0.0) else NOTHING
        if not self._costs.rounds.knows(1, context):
            return NOTHING  # what plain decoding costs here is yet to be seen
        if self._stake and not self._may_lose(self._stake):
            return NOTHING  # nothing was learnt since: such a round costs next to nothing
        budget, rate, seconds = self._planned(rows)
        share_lost = 1 - rate * self._costs.plain(context) / len(rows)
        if share_lost > 0 and not self._may_lose(share_lost * seconds):
            self._stake = share_lost * seconds
            return NOTHING
        if self._stake:  # what came meanwhile was not seen: what was seen before counts half
            for row in rows:
                self.rates[row].fade(0.5)
            self._plan = None
        self._stake = 0.0
        if not self._may_lose(0.0):
            return NOTHING
        return self._wider(budget) if self._is_censored or self._explored % _EXPLORE_EVERY == 0 else budget

    def learn(self, round: Round) -> None:
        if not round.is_warm_up:
            pairs = enumerate(zip(round.paths, round.tokens, strict=True))
            paths = {row: path[1 : len(tokens)] for row, (path, tokens) in pairs if tokens}
            self.record(round.num_nodes, round.depth, paths, round.seconds.total, round.seconds.drafting)

    def close(self) -> None:
        """Keeps what was learnt about acceptance, for what the next text is worth."""
        if self._known is not None:
            rates = AcceptanceRates.average(self.rates)
            rates.fade(_CARRIED_WEIGHT)
            self._known.rates = rates

    def _run(self, num_rows: int) -> None:
        """From now on the target runs so many rows of the batch. What that costs is learnt for this request only: a
        batch of this size drafts for no other rows."""
        if num_rows not in self._costs_by_size:
            self._costs_by_size[num_rows] = self._costs_by_size[len(self.rates)].as_prior()
        if self._costs is not self._costs_by_size[num_rows]:
            self._costs, self._plan = self._costs_by_size[num_rows], None

    def record(
        self, num_nodes: int, depth: int, paths: Mapping[int, Sequence[int]], seconds: float, drafting_seconds: float
    ) -> None:
        """Learns what a round did.

        Args:
            num_nodes: draft nodes that were scored, a row (0: none were drafted).
            depth: how deep the drafter went.
            paths: accepted draft nodes of each row that took part, from depth 1 on.
            seconds: the whole round; `drafting_seconds` of these went into the draft.
        """
        costs = self._costs
        costs.rounds.record(num_nodes + 1, seconds - drafting_seconds, self._context)
        if num_nodes == 0 or not paths:
            self._elapsed += costs.plain(self._context)
            return
        if not self._chooses_depth:  # where a draft ended, there was no more to be had: that is no censoring
            depth = max(depth, *(rates.deepest for rates in self.rates))
        costs.drafting.record(self._cost_depth(depth), drafting_seconds, self._context)
        if self._plan is not None and seconds > _PLAN_SURPRISE * self._plan[2]:
            self._plan = None
        # As it is estimated: one round that was held up by something else says nothing about drafting.
        seconds = costs.verifying(num_nodes, self._context) + costs.drafting_to(self._cost_depth(depth), self._context)
        self._elapsed += seconds
        self._explored += 1
        for row, path in paths.items():
            self.rates[row].record(path, num_nodes, depth)
        tokens = 1 + sum(map(len, paths.values())) / len(paths)
        deepest = max(rates.deepest for rates in self.rates)
        self._is_censored = depth < deepest and tokens - 1 >= depth - 0.5  # most rows were accepted to the end
        plain = costs.plain(self._context)
        self._loss = max(self._loss + seconds - tokens * plain, -_BANK * plain)

    def _sized(self, num_nodes: int, depth: int) -> Budget:
        return Budget(num_nodes, depth if self._chooses_depth else None)

    def _cost_depth(self, depth: int) -> int:
        return depth if self._chooses_depth else 1

    def _may_lose(self, seconds: float) -> bool:
        if not self._costs.rounds:
            return True
        return self._loss + seconds <= LOSS_SHARE * self._elapsed + LOSS_START * self._costs.plain(self._context)

    def _wider(self, budget: Budget) -> Budget:
        """What a round must draft to tell whether more than `budget` would be accepted."""
        assert budget.max_nodes is not None
        return Budget(2 * budget.max_nodes + 1, None if budget.max_depth is None else budget.max_depth + 2)

    def _planned(self, rows: Sequence[int]) -> tuple[Budget, float, float]:
        """`_best`, of the last rounds as a rule."""
        self._plan_age += 1
        has_moved = rows != self._plan_rows or abs(self._context - self._plan_context) > 0.1 * self._plan_context
        if self._plan is None or has_moved or self._plan_age >= _PLAN_EVERY:
            self._plan, self._plan_rows, self._plan_age = self._best(rows), rows, 0
            self._plan_context = self._context
        return self._plan

    def _best(self, rows: Sequence[int]) -> tuple[Budget, float, float]:
        """The budget with the highest expected tokens per second, these, and the seconds that it takes."""
        costs, context = self._costs, self._context
        widest, deepest = (max(getattr(rates, name) for rates in self.rates) for name in ("widest", "deepest"))
        drafting = [costs.drafting_to(self._cost_depth(depth), context) for depth in range(1, deepest + 1)]
        best, best_rate, best_seconds, smaller = NOTHING, 0.0, 0.0, []
        for size in range(min(bisect_left(LADDER, widest) + 1, len(LADDER))):
            num_nodes = min(LADDER[size], widest)
            lengths = [self.rates[row].expected_lengths(size, min(deepest, num_nodes)) for row in rows]
            totals = [sum(column) for column in zip(*lengths, strict=True)]
            # More nodes accept no less; what was seen of them may be older.
            smaller = [max(pair) for pair in zip(totals, smaller, strict=False)] + totals[len(smaller) :]
            verifying = costs.verifying(num_nodes, context)
            for depth, expected in enumerate(smaller, start=1):
                seconds = verifying + drafting[depth - 1]
                if expected > best_rate * seconds:
                    best = self._sized(num_nodes, depth)
                    best_rate, best_seconds = expected / seconds, seconds
        return best, best_rate, best_seconds


class Adaptive(DraftPolicy):
    """Every round drafts what measured costs and acceptance say pays best, and nothing where nothing pays.

    What is learnt goes from request to request, by target and by its adapters: these have nothing in common, another
    one writes another text and takes its own time to do so. Targets that are gone are forgotten.
    """

    is_adaptive = True

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[PreTrainedModel, dict[str, _Known]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Without what was learnt of targets: they are of this process."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()

    def start(self, request: PolicyRequest) -> AdaptiveSession:
        known = self._known.setdefault(request.target, {}).setdefault(request.adapters, _Known())
        costs = known.costs.setdefault(request.batch_size, RoundCosts())
        rates = [AcceptanceRates.average([known.rates]) for _ in range(request.batch_size)]
        return AdaptiveSession(costs, rates, request.chooses_depth, known)

    def __repr__(self) -> str:
        return "Adaptive()"


@dataclass
class _Known:
    """What is known of a target with some adapters.

    Attributes:
        rates: of the last texts.
        costs: by batch size.
    """

    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    costs: dict[int, RoundCosts] = field(default_factory=dict)
