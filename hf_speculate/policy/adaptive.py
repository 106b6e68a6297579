"""The adaptive policy drafts another level or node only while it pays, and nothing where nothing pays.

A drafter gives its confidence in every node (`DraftTree.values`). Calibrated on earlier rounds, this value is the
probability that the node is right. The policy also measures what rounds cost. It prices a token at the recent time per
token; with this price every decision can be made alone (Dinkelbach's method for the largest ratio of two sums).

A balance bounds the losses. The policy begins no draft that the balance could not pay for if every node were wrong. So
a request begins with small drafts, and bad drafts become rare. The docstring of the package explains the balance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from ..drafting import EarlyStopping
from ..target import GenerativeModel
from ..tree import DraftTree, Round
from .acceptance import Acceptance, Average
from .contract import NOTHING, Budget, DraftPolicy, PolicyRequest, PolicySession, Situation
from .costs import RoundCosts
from .early_stopping import WhilePaying


# The allowance is this part of the time of every round. The balance starts with `LOSS_START` one-token forwards.
# Together they are 2 % of 64 tokens.
LOSS_SHARE = 0.01
LOSS_START = 0.6
# The start where forwards are padded, as in graphs. There a draft costs 0.4 to 1.5 forwards whatever its size, and
# to record it once takes as long as dozens.
LOSS_START_PADDED = 3.0
# Largest balance, in one-token forwards, and the largest one that a request takes over from an earlier one. Gains up to
# these may be lost again, so that a few unlucky rounds do not stop a drafter that pays.
_MAX_BALANCE = 8.0
LOSS_CARRIED = 5.0
# Smallest balance. The first round of a kind is slow because libraries prepare kernels in it. The limit keeps such a
# round from stopping drafts for long.
_MIN_BALANCE = -0.1
# Most one-token forwards that reading a prompt counts as a loss. Reading a long prompt takes more, but its own forward
# takes far more.
_MOST_READING = 2.0
_STRAY = 0.1  # largest relative difference between the charged and the expected time of a round
_SURCHARGE_KEPT = 0.95  # part of the surcharge that is kept from one round to the next
_DEEPEST = 16  # levels; a draft that may go this deep has no limit
# After this many rounds without a draft, a drafting time from one or two observations is ignored. First drafts are
# often slow, and without further drafts such a time would never be corrected.
_MANY_IDLE = 64
_FEW_IDLE = 4  # rounds; after more rounds without a draft, a head needs extra time to read what it has missed
# After this many rounds with drafts that gain less than this, a round without one is timed again, and soon another one
# if the estimate is still too high. Nothing else corrects a plain round's time from a minute when the machine was busy.
_MANY_DRAFTED, _SOON, _CLEAR_GAIN = 32, 1, 1.3


@dataclass
class Known:
    """Knowledge from the rounds of similar requests.

    Attributes:
        acceptance: acceptance statistics of the drafter.
        balance: losses that drafts may still make, in one-token forwards.
        tokens, seconds: tokens and time of recent rounds, averaged over rows; the time is in one-token forwards.
        nodes: number of draft nodes of recent rounds with a draft.
        num_idle, num_drafted: number of rounds since the last draft, and since the last round without nodes.
        is_asked: whether the drafter checks before every level (`DraftState.should_continue`).
    """

    acceptance: Acceptance
    tokens: Average = field(default_factory=Average)
    seconds: Average = field(default_factory=Average)
    nodes: Average = field(default_factory=Average)
    num_idle: int = 0
    num_drafted: int = 0
    is_asked: bool = False
    balance: float = LOSS_START

    def copy(self) -> Known:
        return deepcopy(self)

    def fade(self) -> None:
        """Gives all earlier rounds less weight; called once per round."""
        for statistic in (self.acceptance, self.tokens, self.seconds, self.nodes):
            statistic.fade()


class AdaptiveSession(PolicySession):
    """The adaptive policy of one request.

    Args:
        costs: round costs of the target at this batch size.
        known: knowledge that the request begins with; the session changes it.
        batch_size: number of rows.
        keep: function that receives the final `known` when the request ends; None drops it.
    """

    def __init__(
        self,
        costs: RoundCosts,
        known: Known,
        batch_size: int = 1,
        keep: Callable[[Known], None] | None = None,
    ):
        self.known = known
        self._keep = keep
        self._costs = costs
        self._batch_size = batch_size
        self._costs_by_size = {batch_size: costs}
        known.balance = min(max(known.balance, 0.0), LOSS_CARRIED)
        self._num_idle = 0
        self._surcharge = 0.0
        self._reading = 0.0  # loss by reading the prompt first, in one-token forwards
        self._situation = Situation((), 0, 0)
        self._early_stopping: WhilePaying | None = None

    def choose(self, situation: Situation) -> Budget:
        self._run(situation.num_scored)
        self._situation, self._early_stopping, self._reading = situation, None, 0.0
        # Measure plain decoding first: without it nothing can be compared.
        if not self._costs.rounds.knows(1, situation.context):
            return NOTHING
        known = self.known
        if known.num_drafted >= _MANY_DRAFTED and known.tokens.total < _CLEAR_GAIN * known.seconds.total:
            return NOTHING
        if situation.num_unread:
            self._reading = min(self._costs.reading(situation.num_unread) / self._plain, _MOST_READING)
        if not self._can_pay(1, 1):
            return NOTHING
        self._early_stopping = WhilePaying(self.known.acceptance, situation.rows, self._price_of_level)
        if not self._costs.drafting and not self._costs.widths:
            return Budget(None, 1)  # one level measures what a level costs; graphs for it would cost more
        return Budget(None, self._depth_to_pay(_DEEPEST if self.known.is_asked else self._best_depth()))

    def early_stopping(self) -> EarlyStopping | None:
        return self._early_stopping

    def num_nodes(self) -> float | None:
        return self.known.nodes.mean

    def early_stopping_ahead(self) -> EarlyStopping | None:
        return WhilePaying(self.known.acceptance, self._situation.rows, self._price_of_level)

    def cut(self, tree: DraftTree) -> DraftTree:
        """The part of a draft whose nodes pay: the best ones of each row, the same number in every row.

        Reading a tree back from a device would stall it. Such a tree is cut to the node count that paid in recent
        rounds.
        """
        if self._early_stopping is not None and self._early_stopping.is_asked:
            self.known.is_asked = True
        if tree.host_copy.is_on_device:
            return tree.first(max(self._best_count(self.known.acceptance.nodes(), tree.max_depth), 1))
        host, rows = tree.host, self._situation.rows
        of_rows = {row: of_row for row, of_row in enumerate(host.rows()) if row in rows}
        probabilities = [self.known.acceptance.probabilities(tree_row) for tree_row in of_rows.values()]
        self.known.acceptance.note_levels(host, list(of_rows), probabilities, self._price_of_node)
        # Sort them as `best` does.
        ordered = [probs[1:] if host.values is None else sorted(probs[1:], reverse=True) for probs in probabilities]
        means = [sum(probs[node] for probs in ordered) / len(ordered) for node in range(tree.num_nodes - 1)]
        return tree.best(self._best_count(means, tree.max_depth))

    def learn(self, round: Round) -> None:
        rows = [row for row, tokens in enumerate(round.tokens) if tokens]
        if round.is_warm_up:  # its time is not typical, but its accepted tokens count
            if round.num_nodes and rows:
                self._learn_nodes(round, rows)
            return
        self.known.fade()
        if round.seconds.reading:
            self._costs.record_reading(self._situation.num_unread, round.seconds.reading)
        drafts = self._early_stopping is not None
        cost, charged, usual = self._learn_seconds(round, drafts)
        tokens = sum(len(round.tokens[row]) for row in rows) / len(rows)
        self.known.tokens.add(tokens)
        self.known.seconds.add(cost)
        self._num_idle = 0 if drafts else self._num_idle + 1
        self.known.num_idle = 0 if drafts else self.known.num_idle + 1
        self._update_balance(tokens if drafts else None, charged, usual)
        if round.num_nodes:
            self.known.nodes.add(round.num_nodes)
            self._learn_nodes(round, rows)

    def _learn_seconds(self, round: Round, drafts: bool) -> tuple[float, float, float]:
        """Learns from the time of a round. Returns its usual time, its charge and its usual charge, in one-token
        forwards.

        Args:
            drafts: whether the drafter was called.
        """
        costs, context, drafting = self._costs, self._situation.context, round.seconds.drafting
        width, taken = costs.width(round.num_nodes), round.seconds.total - drafting
        costs.rounds.record(width, taken, context)
        if round.num_nodes:
            self.known.num_drafted += 1
        else:
            is_wrong = taken < (1 - _STRAY) * self._plain
            self.known.num_drafted = _MANY_DRAFTED - _SOON if is_wrong else 0
        if not drafts:
            costs.idle.record(drafting)
            if not round.num_nodes:
                return 1.0, 1.0, 1.0  # it is the unit
        plain, seconds = self._plain, costs.rounds.at(width, context)
        charged = usual = seconds
        if not drafts:
            seconds += costs.idle.seconds
        if round.num_nodes:
            is_known = not costs.drafting.has_begun or costs.rounds.is_established(width, context)
            charged, usual = _charges(taken, seconds, is_known)
        if drafts:
            expected, is_known = self._learn_drafting(round)
            more = _charges(drafting, expected, is_known)
            seconds, charged, usual = seconds + expected, charged + more[0], usual + more[1]
        reading = self._reading if drafts else 0.0
        return seconds / plain, charged / plain + reading, usual / plain + reading

    def _update_balance(self, tokens: float | None, charged: float, usual: float) -> None:
        """Changes the balance by a round.

        The surcharge is the part of the charge above the usual one. It is paid back if the machine soon turns out to be
        busy.

        Args:
            tokens: tokens of each row; None if the round had no draft.
            charged, usual: see `_learn_seconds`.
        """

        def balance_after(charge: float) -> float:
            gain = LOSS_SHARE * charge + (0.0 if tokens is None else tokens - charge)
            return min(max(self.known.balance + gain, _MIN_BALANCE), _MAX_BALANCE)

        after, usual_after = balance_after(charged), balance_after(usual)
        self._surcharge = self._surcharge * _SURCHARGE_KEPT + max(usual_after - after, 0.0)
        if self._costs.rounds.are_restless:
            after, self._surcharge = min(after + self._surcharge, _MAX_BALANCE), 0.0
        self.known.balance = after

    def _learn_drafting(self, round: Round) -> tuple[float, bool]:
        """Learns from the time that a draft took. Returns the time expected for such a draft, and whether that estimate
        is reliable."""
        levels, early_stopping, seconds = round.depth, self._early_stopping, round.seconds.drafting
        costs, context = self._costs, self._situation.context
        if not costs.widths and (costs.drafting.skip_cold(levels) if levels else costs.asking.skip_cold()):
            return min(seconds, costs.drafting_to(levels, context) if levels else costs.idle.seconds), True
        if not levels:
            costs.asking.record(seconds)
            return costs.asking.seconds, costs.asking.is_established
        if round.is_ahead:
            return seconds, True
        if self._num_idle > _FEW_IDLE and costs.drafting.is_established(levels, context):
            return costs.drafting_to(levels, context), False
        # Only levels that the drafter asked about cost time. Text copied from the prompt may be deeper at no cost.
        if self.known.is_asked:
            if early_stopping is None or not early_stopping.is_asked:
                return seconds, True
            levels = early_stopping.levels
        costs.drafting.record(levels, seconds, context)
        return costs.drafting_to(levels, context), costs.drafting.is_established(levels, context)

    def _learn_nodes(self, round: Round, rows: Sequence[int]) -> None:
        tree, acceptance = round.tree, self.known.acceptance
        all_rows = tree.host.rows()
        of_rows = {row: all_rows[tree.slot(row)] for row in rows}
        if tree.host_copy.is_on_device:
            probabilities = [acceptance.probabilities(tree_row) for tree_row in of_rows.values()]
            acceptance.note_levels(tree.host, [tree.slot(row) for row in rows], probabilities, self._price_of_node)
            acceptance.note_nodes(probabilities)
        for row, of_row in of_rows.items():
            acceptance.count(of_row, round.paths[row], round.tokens[row])

    def _run(self, num_rows: int) -> None:
        """Switches to the costs of running `num_rows` rows of the batch.

        Costs of another row count than the request's own are learnt for this request only.
        """
        if num_rows not in self._costs_by_size:
            self._costs_by_size[num_rows] = RoundCosts(self._costs_by_size[self._batch_size], self._costs.widths)
        self._costs = self._costs_by_size[num_rows]

    @property
    def _plain(self) -> float:
        """Seconds of a round without a draft."""
        return self._costs.plain(self._situation.context)

    @property
    def _seconds_of_token(self) -> float:
        """The value of one token in seconds: the recent time per token, capped by the time plain decoding takes."""
        known = self.known
        return self._plain * min((known.seconds.total + 1) / (known.tokens.total + 1), 1.0)

    @property
    def _price_of_node(self) -> float:
        """Cost of scoring one more node, in tokens."""
        return self._costs.rounds.slope(self._situation.context) / self._seconds_of_token

    @property
    def _price_of_level(self) -> float:
        """Cost of drafting one more level, in tokens."""
        return self._costs.level(self._situation.context) / self._seconds_of_token

    def _best_count(self, probabilities: Sequence[float], depth: int) -> int:
        """The number of draft nodes to score: the count with the best net gain that the balance can pay for.

        `depth` is the number of levels that were drafted.
        """
        seconds, context = self._costs.verifying, self._situation.context
        per_second, root_alone = 1 / self._seconds_of_token, seconds(0, context)
        worth, best, best_worth = 0.0, 0, 0.0
        for count, probability in enumerate(probabilities, start=1):
            worth += probability
            net = worth - (seconds(count, context) - root_alone) * per_second
            if net > best_worth:
                best, best_worth = count, net
        return _largest(best, lambda count: self._can_pay(depth, count))

    def _best_depth(self) -> int:
        """The depth that would have paid best in recent rounds."""
        worth, best, best_worth, price = 0.0, 1, 0.0, self._price_of_level
        for depth, level in enumerate(self.known.acceptance.levels(), start=1):
            worth += level - (price if depth > 1 else 0.0)
            if worth > best_worth:
                best, best_worth = depth, worth
        return best

    def _can_pay(self, depth: int, num_nodes: int) -> bool:
        """Whether the balance covers the loss if the whole draft is wrong."""
        is_doubtful = self.known.num_idle > _MANY_IDLE
        context = self._situation.context
        loss = self._costs.loss_at_most(depth, num_nodes, context, is_doubtful)
        return loss + self._reading <= self.known.balance

    def _depth_to_pay(self, max_depth: int) -> int | None:
        """The number of levels, up to `max_depth`, that the balance can pay for with one node each; None means no
        limit."""
        depth = _largest(max_depth, lambda depth: self._can_pay(depth, depth))
        return None if depth == _DEEPEST else depth

    def close(self) -> None:
        if self._keep is not None:
            self._keep(self.known)


def _charges(taken: float, expected: float, is_known: bool) -> tuple[float, float]:
    """The charge for a time in seconds, and the usual charge.

    The usual charge is near the expected time: a round that another process delayed says nothing about drafting. The
    charge is the usual one once the expected time is reliable (`is_known`).
    """
    near = min(max(taken, (1 - _STRAY) * expected), (1 + _STRAY) * expected)
    return near if is_known else max(taken, expected), near


def _largest(limit: int, is_possible: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that is possible, or 0. If a number is possible, so are all smaller ones."""
    if not limit or is_possible(limit):
        return limit
    return bisect_left(range(1, limit), True, key=lambda number: not is_possible(number))


class Adaptive(DraftPolicy):
    """Drafts in every round what pays best by measured costs and acceptance, and nothing where nothing pays.

    The policy remembers what it learns for each target, its adapters and for sampled or greedy requests. It forgets
    targets that no longer exist.
    """

    is_adaptive = True

    def __init__(self) -> None:
        self._costs: WeakKeyDictionary[GenerativeModel, dict[Hashable, RoundCosts]] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[GenerativeModel, dict[tuple[str, bool], Known]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """An empty state: what was learnt about targets belongs to this process."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()

    def start(self, request: PolicyRequest) -> AdaptiveSession:
        costs = self._costs.setdefault(request.target, {})
        known, kind = self._known.setdefault(request.target, {}), (request.adapters, request.samples)
        if kind not in known:
            start = LOSS_START_PADDED if request.widths else LOSS_START
            known[kind] = Known(Acceptance(request.calibration.start(request.samples)), balance=start)

        size, ahead = request.batch_size, request.looks_ahead
        if (key := (request.adapters, size, ahead, tuple(request.widths))) not in costs:
            costs[key] = RoundCosts(widths=request.widths)

        def keep(learnt: Known) -> None:
            known[kind] = learnt

        return AdaptiveSession(costs[key], known[kind].copy(), size, keep)

    def __repr__(self) -> str:
        return "Adaptive()"
