"""From measured costs and acceptance to a plan: which options pay best for a drafter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..costs import CostSurface
from ..drafter import Drafter, Knobs
from ..planning import DraftedRound, Plan, RankTable, dynamic_plans, static_plans
from ..reach import LADDER, Acceptance
from ..tuning_file import TargetCosts
from .surveys import Survey


MAX_CANDIDATES = 3
_DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24)
_REMEMBERED_ROUNDS = 8.0  # the weight that acceptance from a file has for a new text


@dataclass(frozen=True)
class CostModel:
    """Seconds of rounds at one context.

    Attributes:
        costs: of the target, with what the drafter's feature taps cost it.
        drafting: by width (of a drafter without one: 1).
        context: cache entries, the mean over the calls in question.
    """

    costs: TargetCosts
    drafting: Mapping[int, CostSurface]
    context: int

    @property
    def plain(self) -> float:
        """Of a token of stock `generate`."""
        return self.costs.plain(1, self.context)

    def verify(self, nodes: int) -> float:
        """Of a round with so many draft nodes, its draft left out."""
        return self.costs.rounds(nodes + 1, self.context)

    def draft(self, depth: int, width: int) -> float:
        return self.drafting_at(width)(depth, self.context)

    def drafting_at(self, width: int) -> CostSurface:
        """The surface of the nearest width that was measured."""
        return self.drafting[min(self.drafting, key=lambda known: abs(known - width))]

    def of(self, drafted: Survey, width: int) -> float:
        """Mean seconds of the rounds of a survey, from the sizes that they had."""
        surface, total = self.drafting_at(width), 0.0
        for measured in drafted.rounds:
            total += self.costs.rounds(measured.nodes + 1, measured.context)
            total += surface(measured.depth if measured.nodes else surface.sizes[0], measured.context)
        return total / len(drafted.rounds)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Options of a drafter, and what is expected of them.

    Attributes:
        plan: None for options that are taken as they are.
    """

    name: str
    drafter: Drafter
    options: Mapping[str, Any]
    width: int
    plan: Plan | None = None


def candidates(drafter: Drafter, explored: Mapping[int, Survey], model: CostModel) -> list[Candidate]:
    """The most promising options, best first, at most one of each width; none if the drafter has no knobs.

    Args:
        explored: by width; trees of other widths are judged by the next wider ones.
    """
    knobs = drafter.knobs
    if knobs is None:
        return []
    plans = _static(explored[max(explored)], model) if knobs.choices else _dynamic(knobs, explored, model)
    best: dict[int, Plan] = {}
    for plan in plans:
        width = 1 if knobs.choices else plan.width
        if width not in best or plan.rate > best[width].rate:
            best[width] = plan
    ranked = sorted(best.items(), key=lambda pair: -pair[1].rate)[:MAX_CANDIDATES]
    return [_candidate(drafter, knobs, plan, width) for width, plan in ranked]


def _candidate(drafter: Drafter, knobs: Knobs, plan: Plan, width: int) -> Candidate:
    if knobs.choices:
        options: dict[str, Any] = {knobs.choices: [list(choice) for choice in plan.choices or ()]}
    else:
        values = {knobs.depth: plan.depth, knobs.width: plan.width, knobs.nodes: plan.nodes}
        options = {name: value for name, value in values.items() if name is not None}
    names = ", ".join(f"{k}={v}" for k, v in options.items()) if not knobs.choices else f"static tree of {plan.nodes}"
    reset = dict.fromkeys(knobs.others)
    return Candidate(
        name=names, drafter=drafter.with_options(**{**reset, **options}), options=options, width=width, plan=plan
    )


def _static(explored: Survey, model: CostModel) -> Iterator[Plan]:
    rates = rank_table(explored.drafted).rates()
    return static_plans(rates, model.verify, model.draft, max_nodes=LADDER[-1])


def _dynamic(knobs: Knobs, explored: Mapping[int, Survey], model: CostModel) -> Iterator[Plan]:
    deepest = knobs.explored.get(knobs.depth or "", 1)
    most = knobs.explored.get(knobs.nodes or "", LADDER[-1])
    for width in knobs.widths if knobs.width else (max(explored),):
        yield from dynamic_plans(
            explored[min((known for known in explored if known >= width), default=max(explored))].drafted,
            model.verify,
            model.draft,
            widths=(width,),
            depths=[depth for depth in _DEPTHS if depth <= deepest],
            # Near the size of the explored trees a replay lacks nodes that the tree itself would have.
            sizes=[size for size in LADDER if size <= most // 2],
        )


def rank_table(rounds: Sequence[DraftedRound]) -> RankTable:
    """Acceptance by depth and rank of all rounds."""
    table = RankTable()
    for round_ in rounds:
        table.record(round_)
    return table


def remembered(drafted: Survey) -> Acceptance:
    """What a tuner should begin with: all rounds alike, with the weight of a few."""
    acceptance = Acceptance(decay=1.0)
    for round_ in drafted.drafted:
        if len(round_.parents) > 1:
            acceptance.record(round_.path, len(round_.parents) - 1, max(round_.depths))
    return acceptance.weighing(_REMEMBERED_ROUNDS)


def with_overhead(costs: TargetCosts, seconds: float) -> TargetCosts:
    """The costs of a target whose rounds take so much longer than a script's (feature taps, what a drafter is told)."""
    return replace(costs, rounds=costs.rounds.plus(seconds))
