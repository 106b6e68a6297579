"""Rounds of the real decoding loop with budgets that are set beforehand: what they cost, and what was accepted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from ..costs import CostSurface
from ..drafter import Drafter, DraftRequest, DraftSession, DraftState
from ..models import GenerativeModel
from ..planning import DraftedRound
from ..reach import Acceptance
from ..speculator import Speculator
from ..stats import SpeculationStats
from ..testing import ScriptedDrafter
from ..tree import DraftTree
from ..tuning import NOTHING, Budget, Experience, RoundCosts, Tuner
from ..tuning_file import Setting, TargetCosts


SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # draft nodes
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
PASSES = 3
_PER_PASS = 3  # rounds of every size
_PLAIN_STEPS = 12
_WARM_UP = 3

Advance = Callable[[str], None]


@dataclass(frozen=True)
class MeasuredRound:
    """One round: whether no draft was asked for, draft nodes a row, depth of the draft, cache entries a row; seconds of
    drafting and of the rest."""

    is_plain: bool
    nodes: int
    depth: int
    context: int
    drafting_seconds: float
    other_seconds: float


class _Scheduled(Tuner):
    """Hands out given budgets, and none when they are used up; keeps what the rounds cost and drafted."""

    def __init__(self, budgets: Iterable[Budget], then: Budget, watched: _Watched, batch_size: int):
        super().__init__(RoundCosts(), [Acceptance() for _ in range(batch_size)])
        self._budgets, self._then, self._watched = iter(budgets), then, watched
        self.is_done = False
        self._budget = NOTHING
        self.rounds: list[MeasuredRound] = []
        self.drafted: list[DraftedRound] = []

    def choose(self, rows: Sequence[int], context: int = 0) -> Budget:
        self._context, self._watched.tree = context, None
        budget = next(self._budgets, None)
        self.is_done = budget is None and self._then is NOTHING
        self._budget = self._then if budget is None else budget
        return self._budget

    def record(
        self,
        num_nodes: int,
        depth: int,
        paths: Mapping[int, Sequence[int]],
        *,
        seconds: float,
        drafting_seconds: float,
    ) -> None:
        if self.is_done:
            return
        self.rounds.append(
            MeasuredRound(
                is_plain=self._budget.max_nodes == 0,
                nodes=num_nodes,
                depth=depth,
                context=self._context,
                drafting_seconds=drafting_seconds,
                other_seconds=seconds - drafting_seconds,
            )
        )
        tree = self._watched.tree
        if tree is None or tree.num_nodes == num_nodes + 1:  # else it was cut, and its nodes have other numbers
            parents = [[-1]] * len(self.acceptances) if tree is None else tree.host.parents
            self.drafted += [DraftedRound.of_row(parents[row], path) for row, path in paths.items()]


class _Stop(StoppingCriteria):
    """Ends a call when the budgets are used up."""

    row_wise = True

    def __init__(self, tuner: _Scheduled):
        self._tuner = tuner

    def __call__(self, input_ids, scores, **_: Any) -> torch.BoolTensor:
        return torch.full((input_ids.shape[0],), self._tuner.is_done, device=input_ids.device)  # type: ignore


class _Plan(Experience):
    def __init__(self, tuner: _Scheduled):
        super().__init__()
        self._tuner = tuner

    def tuner(self, target, batch_size: int, adapters: str = "", chooses_depth: bool = True) -> Tuner:
        return self._tuner

    def learn(self, target, tuner: Tuner, adapters: str = "") -> None:
        pass


class _Watched(Drafter):
    """A drafter that shows the trees it drafts."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.feature_layers = drafter, drafter.feature_layers
        self.name = drafter.name  # type: ignore[misc]
        self.tree: DraftTree | None = None

    @classmethod
    def for_target(cls, target, **options: Any):
        raise NotImplementedError

    def check_target(self, target) -> None:
        self.drafter.check_target(target)

    def start(self, request: DraftRequest) -> DraftSession:
        return _WatchedSession(self, self.drafter.start(request))


class _WatchedSession(DraftSession):
    def __init__(self, watched: _Watched, session: DraftSession):
        self.watched, self.session = watched, session
        self.carries_over = session.carries_over

    def draft(self, state: DraftState) -> DraftTree:
        self.watched.tree = self.session.draft(state)
        return self.watched.tree

    def observe(self, tokens, features, lengths) -> None:
        self.session.observe(tokens, features, lengths)

    def close(self) -> None:
        self.session.close()


@dataclass(frozen=True)
class Survey:
    """What the rounds of one call, or several, cost and drafted.

    Attributes:
        seconds: of the whole calls.
        tokens: emitted, a row.
    """

    rounds: list[MeasuredRound]
    drafted: list[DraftedRound]
    seconds: float
    tokens: int
    stats: SpeculationStats


def survey(
    target: GenerativeModel,
    drafter: Drafter,
    input_ids: Tensor,
    budgets: Iterable[Budget],
    then: Budget,
    request: Mapping[str, Any],
) -> Survey:
    """Runs one call with the given budgets, then `then` for all further rounds; `NOTHING` ends it."""
    watched = _Watched(drafter)
    tuner = _Scheduled(budgets, then, watched, input_ids.shape[0])
    speculator = Speculator(watched, adaptive=True)
    speculator.experience = _Plan(tuner)
    start = time.perf_counter()
    sequences = target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        speculator=speculator,
        stopping_criteria=StoppingCriteriaList([_Stop(tuner)] if then is NOTHING else []),
        **request,
    )
    seconds = time.perf_counter() - start
    return Survey(tuner.rounds, tuner.drafted, seconds, sequences.shape[1] - input_ids.shape[1], speculator.stats)


def measure_target(
    target: GenerativeModel,
    text: Tensor,
    contexts: Sequence[int],
    batch_size: int,
    advance: Advance = lambda _: None,
    sizes: Sequence[int] = SIZES,
) -> TargetCosts:
    """Seconds of rounds by nodes and context, and of a token of stock `generate`, measured in turn.

    Args:
        text: int64 [S], repeated to the length of each context.
        contexts: ascending.
    """
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    drafter = ScriptedDrafter([0], _branching(max(sizes)), accuracy=0.0, vocab_size=vocab_size)
    order, rounds, plain = random.Random(0), [], []
    for context in contexts:
        prompt = _tiled(text, context, batch_size)
        others: dict[int, list[float]] = {size: [] for size in sizes}
        steps: list[float] = []
        first: list[float] = []
        for run in range(PASSES):
            step = median(plain_steps(target, prompt, _PLAIN_STEPS)[1:])
            steps.append(step)
            drafted = [size for size in sizes if size]
            budgets = _paced(
                [Budget(max_nodes=size) for _ in range(_PER_PASS) for size in order.sample(drafted, len(drafted))]
            )
            found = survey(target, drafter, prompt, budgets, NOTHING, request(2 * len(budgets))).rounds
            first.append(median(measured.other_seconds for measured in found if measured.is_plain) / step)
            # The first round of a structure makes its plan.
            for measured, plain_seconds in _beside_plain(found)[_WARM_UP + (2 * len(drafted) if run == 0 else 0) :]:
                others.get(measured.nodes, []).append(measured.other_seconds / plain_seconds)
            advance(f"target, context {context}")
        # Ratios of neighbours only: a machine that slows down for a while slows them alike.
        rounds.append(tuple(median(others[size]) * median(first) * median(steps) for size in sizes))
        plain.append((median(steps),))
    middle = tuple(context + _PER_PASS * len(sizes) // 2 for context in contexts)
    return TargetCosts(
        Setting.of(target, batch_size),
        CostSurface(middle, tuple(size + 1 for size in sizes), tuple(rounds)),
        CostSurface(tuple(context + _PLAIN_STEPS // 2 for context in contexts), (1,), tuple(plain)),
    )


def measure_drafting(
    target: GenerativeModel,
    drafter: Drafter,
    text: Tensor,
    contexts: Sequence[int],
    batch_size: int,
    costs: TargetCosts,
    advance: Advance = lambda _: None,
) -> tuple[CostSurface, list[float]]:
    """Seconds of a draft by depth and context; and how much longer the rest of a round takes than a script's."""
    order, rows, extra = random.Random(0), [], []
    for context in contexts:
        prompt = _tiled(text, context, batch_size)
        depths = [depth for depth in DEPTHS for _ in range(_PER_PASS * 2)]
        budgets = _paced([Budget(max_depth=depth) for depth in order.sample(depths, len(depths))])
        found = survey(target, drafter, prompt, budgets, NOTHING, request(_room(target, context))).rounds
        by_depth: dict[int, list[float]] = {0: []}
        for measured, plain_seconds in _beside_plain(found)[_WARM_UP:]:
            slower = plain_seconds / costs.rounds(1, measured.context)
            if not measured.is_plain:
                depth = measured.depth if measured.nodes else 0
                by_depth.setdefault(depth, []).append(measured.drafting_seconds / slower)
                extra.append(measured.other_seconds / slower - costs.rounds(measured.nodes + 1, measured.context))
        rows.append({depth: median(values) for depth, values in by_depth.items() if values})
        advance(f"drafting, context {context}")
    depths = tuple(sorted(set.intersection(*(set(row) for row in rows)) - {0})) or (1,)
    # A drafter that found nothing to draft spent some time on it all the same.
    table = tuple(tuple(row.get(depth, row.get(0, 0.0)) for depth in depths) for row in rows)
    return CostSurface(tuple(contexts), depths, table), extra


def learn(
    target: GenerativeModel,
    drafter: Drafter,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    arguments: Mapping[str, Any],
    advance: Advance = lambda _: None,
) -> Survey:
    """Drafts everything that the options allow on every prompt (int64 [B, S])."""
    rounds, drafted, seconds, tokens, stats = [], [], 0.0, 0, SpeculationStats()
    for index, prompt in enumerate(prompts):
        torch.manual_seed(index)
        found = survey(target, drafter, prompt, (), Budget(), {**request(max_new_tokens), **arguments})
        rounds += found.rounds
        drafted += found.drafted
        seconds, tokens = seconds + found.seconds, tokens + found.tokens
        stats.merge(found.stats)
        advance("acceptance")
    return Survey(rounds, drafted, seconds, tokens, stats)


def plain_steps(target: GenerativeModel, input_ids: Tensor, count: int) -> list[float]:
    """Seconds from forward to forward of stock `generate`: the prompt's first, then one a token."""
    starts: list[float] = []
    hook = target.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter()))
    try:
        mask = torch.ones_like(input_ids)
        target.generate(input_ids, attention_mask=mask, speculator=None, **request(count + 2))
    finally:
        hook.remove()
    return [end - start for start, end in pairwise(starts)]


def pace(target: GenerativeModel, input_ids: Tensor, costs: TargetCosts) -> float:
    """How much slower the machine is just now than when the costs were measured: by stock's steps."""
    return median(plain_steps(target, input_ids, _PLAIN_STEPS)[1:]) / costs.plain(1, input_ids.shape[1])


def request(max_new_tokens: int) -> dict[str, Any]:
    """Greedy, of exactly so many tokens."""
    return {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def _paced(budgets: Sequence[Budget]) -> list[Budget]:
    """With a plain round beside every two others, that they can be compared with."""
    paced = [Budget()] * (_WARM_UP - 1)
    for index, budget in enumerate(budgets):
        paced += [budget] if index % 2 else [NOTHING, budget]
    return [*paced, NOTHING]


def _beside_plain(rounds: Sequence[MeasuredRound]) -> list[tuple[MeasuredRound, float]]:
    """Every round with the seconds of the plain ones near it."""
    plain = [index for index, measured in enumerate(rounds) if measured.is_plain]
    nearest = (sorted(plain, key=lambda other: abs(other - index))[:3] for index in range(len(rounds)))
    return [
        (measured, median(rounds[other].other_seconds for other in others))
        for measured, others in zip(rounds, nearest, strict=True)
    ]


def _room(target: GenerativeModel, context: int, wanted: int = 512) -> int:
    longest = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return wanted if longest is None else max(min(wanted, longest - context), 32)


def _tiled(text: Tensor, length: int, batch_size: int) -> Tensor:
    return text.repeat(-(-length // len(text)))[:length].repeat(batch_size, 1)


def _branching(nodes: int) -> tuple[int, ...]:
    """Children a level of a scripted tree with so many draft nodes: about log2 levels, evenly filled."""
    depth = nodes.bit_length()
    return tuple((nodes - level + depth - 1) // depth for level in range(depth))
