"""The adaptive policy against brute force and simulated clocks: no test here looks at a real one."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import replace

import pytest
import torch

from hf_speculate import Speculator
from hf_speculate.drafting.observations import Observation, joined
from hf_speculate.policy import NOTHING, Budget, Situation
from hf_speculate.policy.adaptive import LOSS_SHARE, LOSS_START, AdaptiveSession
from hf_speculate.policy.costs import RoundCosts
from hf_speculate.policy.rates import LADDER, AcceptanceRates
from hf_speculate.round import Round, RoundSeconds
from hf_speculate.testing.scripted import RandomDrafter, ScriptedDrafter
from hf_speculate.tree import DraftTree

from ..support.clocks import ForwardClock
from ..support.models import VOCAB_SIZE


def random_rounds(count, seed=0):
    """(accepted path, nodes, depth) of rounds with trees of several sizes."""
    generator, rounds = random.Random(seed), []
    for _ in range(count):
        num_nodes, depth = generator.choice([4, 12, 31]), generator.choice([2, 4, 5])
        path, node = [], 0
        while len(path) < depth and generator.random() < 0.7:
            node = generator.randint(node + 1, node + 4)
            if node > num_nodes:
                break
            path.append(node)
        rounds.append((path, num_nodes, depth))
    return rounds


def situation(*rows, context=0):
    """These rows take part (the first, if none is named), and no others are run."""
    return Situation(rows or (0,), num_scored=len(rows) or 1, context=context)


class TestAcceptanceRates:
    def test_smaller_trees_are_judged_as_if_they_had_been_drafted(self):
        """Rates from wide rounds against replays: what would the first n nodes to depth d have accepted?"""
        acceptance = AcceptanceRates(decay=1.0)
        rounds = [(path, 31, 5) for path, _, _ in random_rounds(4000)]
        for path, num_nodes, depth in rounds:
            acceptance.record(path, num_nodes, depth)
        for size in range(bisect_left(LADDER, 31) + 1):
            lengths = acceptance.expected_lengths(size, 5)
            for depth in range(1, 6):
                replayed = [1 + sum(node <= LADDER[size] for node in path[:depth]) for path, _, _ in rounds]
                assert lengths[depth - 1] == pytest.approx(sum(replayed) / len(replayed), abs=0.02), (size, depth)

    def test_rounds_of_different_sizes_count_where_they_say_something(self):
        acceptance, plain = AcceptanceRates(decay=1.0), {}
        for path, num_nodes, depth in random_rounds(600):
            acceptance.record(path, num_nodes, depth)
            for size, n in enumerate(LADDER):
                if bisect_left(LADDER, num_nodes) < size:
                    continue  # more than was drafted: unknown
                for level in range(depth):
                    inside = all(node <= n for node in path[:level]) and len(path) >= level
                    if inside:
                        trials, hits = plain.get((level, size), (0, 0))
                        plain[level, size] = (trials + 1, hits + (len(path) > level and path[level] <= n))
        for (level, size), (trials, hits) in plain.items():
            assert (acceptance._trials[level][size], acceptance._hits[level][size]) == (trials, hits)

    def test_a_path_accepted_to_the_end_says_nothing_about_what_comes_below(self):
        acceptance = AcceptanceRates()
        for _ in range(50):
            acceptance.record([1, 2], num_nodes=2, depth=2)
        deeper = acceptance.expected_lengths(size=1, max_depth=4)
        assert deeper[1] == pytest.approx(3.0, abs=0.1)
        assert deeper[3] == pytest.approx(5.0, abs=0.5)

    def test_old_rounds_fade(self):
        acceptance = AcceptanceRates()
        for _ in range(200):
            acceptance.record([1, 2, 3], 3, 3)
        for _ in range(40):
            acceptance.record([], 3, 3)
        assert acceptance.expected_lengths(2, 3)[-1] < 1.3

    def test_the_average_of_equal_rows_is_the_row(self):
        row = AcceptanceRates()
        for path, num_nodes, depth in random_rounds(30):
            row.record(path, num_nodes, depth)
        mean = AcceptanceRates.average([row, row, row])
        assert (mean.widest, mean.deepest) == (31, 5)
        for size in range(len(LADDER)):
            assert mean.expected_lengths(size, 5) == pytest.approx(row.expected_lengths(size, 5))


class Simulation:
    """Decoding one row where plain rounds cost 1 and others what `cost(num_nodes, depth)` says."""

    def __init__(self, cost, accepts, widest=16, deepest=5):
        self.cost, self.accepts, self.widest, self.deepest = cost, accepts, widest, deepest
        self.policy = AdaptiveSession(RoundCosts(), [AcceptanceRates()])
        self.seconds, self.tokens, self.budgets = 0.0, 0, []

    def run(self, num_tokens):
        while self.tokens < num_tokens:
            budget = self.policy.choose(situation())
            self.budgets.append(budget)
            num_nodes = self.widest if budget.max_nodes is None else min(budget.max_nodes, self.widest)
            depth = self.deepest if budget.max_depth is None else min(budget.max_depth, self.deepest)
            path = [node for node in self.accepts(self.tokens)[:depth] if node <= num_nodes] if num_nodes else []
            drafting = 0.05 * depth if num_nodes else 0.0
            seconds = (self.cost(num_nodes) if num_nodes else 1.0) + drafting
            self.policy.record(num_nodes, depth, {0: path}, seconds=seconds, drafting_seconds=drafting)
            self.seconds += seconds
            self.tokens += len(path) + 1
        return self


@pytest.mark.parametrize("slope", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("num_tokens", [256, 2000])
def test_text_that_drafts_badly_costs_little_more_than_plain_decoding(slope, num_tokens):
    run = Simulation(lambda n: 1 + slope * n, accepts=lambda _: []).run(num_tokens)
    round_cost = 1 + 16 * slope + 0.25  # the rounds before the first choice are the widest
    assert run.seconds - run.tokens <= LOSS_SHARE * run.seconds + LOSS_START + 2 * (round_cost - 1)
    if slope < 0.5 or num_tokens > 256:
        assert run.seconds <= 1.05 * run.tokens
        assert any(budget != NOTHING for budget in run.budgets[len(run.budgets) // 2 :])  # it keeps trying
    assert sum(budget == NOTHING for budget in run.budgets) > len(run.budgets) / 2


def test_text_that_begins_to_draft_well_is_noticed():
    run = Simulation(lambda n: 1 + 0.03 * n, accepts=lambda done: [] if done < 300 else [1, 2, 3, 4, 5]).run(300)
    before = run.seconds
    run.run(900)
    assert run.seconds - before < 600 / 6 * (1 + 0.03 * 5 + 0.25) * 1.5


@pytest.mark.parametrize("slope", [0.005, 0.05, 0.2])
def test_the_chosen_budget_is_near_the_best_fixed_one(slope):
    generator = random.Random(0)
    paths = [path for path, _, _ in random_rounds(500)]

    def cost(n):
        return 1 + slope * n

    run = Simulation(cost, accepts=lambda _: generator.choice(paths)).run(6000)
    best = 1.0
    for n in (n for n in LADDER if n <= 16):
        for depth in range(1, 6):
            expected = sum(1 + sum(node <= n for node in path[:depth]) for path in paths) / len(paths)
            best = max(best, expected / (cost(n) + 0.05 * depth))
    assert run.tokens / run.seconds > 0.93 * best


def test_trees_beyond_the_ladder_are_cut_to_it():
    run = Simulation(lambda n: 1 + 0.0001 * n, accepts=lambda _: [1, 2, 140], widest=300).run(400)
    assert max(budget.max_nodes or 0 for budget in run.budgets[20:]) <= 2 * LADDER[-1] + 1


def test_rows_are_judged_together():
    """One row drafts well and one badly: what pays is the sum."""
    costs = RoundCosts()
    good, bad = AcceptanceRates(), AcceptanceRates()
    policy = AdaptiveSession(costs, [good, bad])
    for _ in range(40):
        policy.record(0, 0, {}, seconds=1.0, drafting_seconds=0.0)
        policy.record(4, 4, {0: [1, 2, 3, 4], 1: []}, seconds=2.0, drafting_seconds=0.1)
    assert policy.choose(situation(0, 1)).max_depth == 4
    assert policy._best([1])[1] < 1.0 < policy._best([0])[1]


def test_without_a_draft_ever_there_is_nothing_to_choose_from():
    policy = AdaptiveSession(RoundCosts(), [AcceptanceRates()])
    for _ in range(20):
        assert policy.choose(situation()) == Budget(8, 3)
        policy.record(0, 0, {}, seconds=1.0, drafting_seconds=0.0)


def test_a_drafter_that_chooses_its_depth_is_asked_for_nodes_only():
    """Half its drafts end at depth 1, where it found no more, half are right to depth 4. That a short one was right to
    its end promises nothing; and what deeper drafts took is no reason to ask for shallower ones."""
    policy = AdaptiveSession(RoundCosts(), [AcceptanceRates()], chooses_depth=False)
    for _ in range(60):
        policy.record(0, 0, {}, seconds=1.0, drafting_seconds=0.0)
        policy.record(4, 4, {0: [1, 2, 3, 4]}, seconds=1.9, drafting_seconds=0.7)
        policy.record(4, 1, {0: [1]}, seconds=1.3, drafting_seconds=0.1)
    budget, rate, seconds = policy._best([0])
    assert budget == Budget(4, None)
    assert rate * seconds == pytest.approx((5 + 2) / 2, abs=0.2)
    by_depth = AdaptiveSession(RoundCosts(), [AcceptanceRates()])
    for _ in range(60):
        by_depth.record(4, 4, {0: [1, 2, 3, 4]}, seconds=1.9, drafting_seconds=0.7)
        by_depth.record(4, 1, {0: [1]}, seconds=1.3, drafting_seconds=0.1)
    assert by_depth._best([0])[0].max_depth == 4  # the short ones count as cut off there


@pytest.fixture
def clock(monkeypatch, tiny_model):
    clock = ForwardClock(monkeypatch, tiny_model())
    yield clock
    clock.hook.remove()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_bad_drafts_are_switched_off_and_the_text_stays(clock, tiny_model, batch_size):
    model, ids = tiny_model(), torch.randint(3, VOCAB_SIZE, (batch_size, 12))
    plain = model.generate(ids, max_new_tokens=200)
    plain_seconds, clock.now = clock.now, 0.0
    fixed = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE), adaptive=False)
    model.generate(ids, max_new_tokens=200, speculator=fixed)
    assert clock.now > 1.2 * plain_seconds
    clock.now = 0.0
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE), adaptive=True)
    assert torch.equal(model.generate(ids, max_new_tokens=200, speculator=speculator), plain)
    assert clock.now < 1.05 * plain_seconds
    assert speculator.stats.rounds_without_draft > speculator.stats.rounds >= 3


def test_good_drafts_stay_on_and_the_next_call_knows(clock, tiny_model, prompt):
    model, ids = tiny_model(), prompt(12)
    plain = model.generate(ids, max_new_tokens=128)
    drafter = ScriptedDrafter(plain[:, 12:], (2, 1, 1, 1), accuracy=1.0, vocab_size=VOCAB_SIZE)
    speculator = Speculator(drafter, adaptive=True)
    assert torch.equal(model.generate(ids, max_new_tokens=128, speculator=speculator), plain)
    assert speculator.stats.rounds_without_draft <= 2  # one to see what plain decoding costs, one for the last token
    speculator.stats.reset()
    model.generate(ids, max_new_tokens=128, speculator=speculator)
    assert speculator.stats.rounds_without_draft <= 1
    assert speculator.stats.mean_acceptance_length > 4


def test_joined_observations_are_the_rows_one_after_the_other():
    def observation(start, lengths, width):
        tokens = torch.arange(start, start + 2 * width).view(2, width)
        return Observation(tokens, {3: tokens[..., None].double()}, torch.tensor(lengths))

    whole = joined([observation(0, [3, 1], 3), observation(10, [0, 1], 1), observation(20, [2, 2], 2)])
    assert whole.lengths.tolist() == [5, 4]
    assert whole.tokens[0].tolist() == [0, 1, 2, 20, 21]
    assert whole.tokens[1, :4].tolist() == [3, 11, 22, 23]
    assert torch.equal(whole.features[3][..., 0][1, :4], whole.tokens[1, :4].double())


class TestContext:
    """Rounds whose nodes cost more the longer the context: at 8000 a wide tree loses, at 200 it wins."""

    @staticmethod
    def seconds(nodes, context):
        return 1 + context / 8000 + nodes * (0.02 + 0.4 * context / 8000)

    def rounds(self, policy, count, context):
        """Budgets of rounds in which every draft is accepted to its fourth node."""
        budgets = []
        for _ in range(count):
            budget = policy.choose(situation(context=context))
            nodes = 16 if budget.max_nodes is None else min(budget.max_nodes, 16)
            depth = 5 if budget.max_depth is None else min(budget.max_depth, 5)
            path = [node for node in (1, 3, 6, 12)[:depth] if node <= nodes]
            seconds = self.seconds(nodes, context)
            policy.record(nodes, depth, {0: path}, seconds=seconds, drafting_seconds=0.0)
            budgets.append(budget)
        return budgets

    def test_a_longer_context_shrinks_the_trees_at_once(self):
        policy = AdaptiveSession(RoundCosts(), [AcceptanceRates()])
        short = self.rounds(policy, 60, context=200)
        assert max(budget.max_nodes for budget in short[-12:]) >= 12
        long = self.rounds(policy, 8, context=8000)
        assert long[0] == NOTHING  # what plain decoding costs there
        assert long[1].max_nodes >= 6
        assert [budget.max_nodes for budget in long[2:6]] == [3] * 4
        assert self.rounds(policy, 8, context=200)[1].max_nodes >= 12

    def test_a_round_that_was_held_up_does_not_switch_drafting_off(self):
        policy = AdaptiveSession(RoundCosts(), [AcceptanceRates()])
        self.rounds(policy, 40, context=200)
        policy.choose(situation(context=200))
        policy.record(12, 4, {0: [1, 3, 6, 12]}, seconds=500.0, drafting_seconds=0.0)
        assert NOTHING not in self.rounds(policy, 20, context=200)


def test_rounds_that_compiled_teach_nothing():
    warm_up = Round(
        tree=DraftTree.from_rows([([5], [-1])]),
        paths=[[0]],
        tokens=[[7]],
        num_accepted=[0],
        lengths=[9],
        context=9,
        seconds=RoundSeconds(total=500.0),
        is_warm_up=True,
    )
    costs = RoundCosts()
    policy = AdaptiveSession(costs, [AcceptanceRates()])
    policy.learn(warm_up)
    assert not costs.rounds.knows(1)
    policy.learn(replace(warm_up, is_warm_up=False))
    assert costs.rounds.knows(1)


def test_rounds_over_a_part_of_the_batch_teach_nothing_about_the_whole():
    costs = RoundCosts()
    policy = AdaptiveSession(costs, [AcceptanceRates() for _ in range(4)])
    policy.choose(situation(0, 1, 2, 3))
    for num_nodes, seconds in ((0, 1.0), (8, 1.8)):
        policy.record(num_nodes, 2, {row: [1] for row in range(4)}, seconds=seconds, drafting_seconds=0.0)
    before = costs.plain(), costs.verifying(8)
    policy.choose(situation(2))
    assert policy._costs.rounds.knows(1), "what the whole batch costs tells enough to draft at once"
    for _ in range(5):
        policy.record(0, 0, {2: []}, seconds=0.25, drafting_seconds=0.0)
    assert policy._costs.plain() == pytest.approx(0.25)
    assert policy._costs.verifying(8) == pytest.approx(0.25 * before[1] / before[0])  # stretched by what was seen
    assert (costs.plain(), costs.verifying(8)) == before


def test_a_policy_that_knows_nothing_begins_with_plain_rounds_whatever_the_rows():
    policy = AdaptiveSession(RoundCosts(), [AcceptanceRates() for _ in range(4)])
    policy.choose(situation(0, 1))
    assert not policy._costs.rounds.knows(1)
