"""The adaptive policy in simulated decoding, where rounds take what they are said to: no test looks at a clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from hf_speculate import Speculator
from hf_speculate.policy import NOTHING, Situation
from hf_speculate.policy.adaptive import LOSS_SHARE, LOSS_START, LOSS_START_PADDED
from hf_speculate.policy.costs import RoundCosts
from hf_speculate.testing.scripted import RandomDrafter, ScriptedDrafter
from hf_speculate.tree import DraftTree, RoundSeconds, TreeRow

from ..support.decoding import ROOT, ForwardClock, Simulation, best_fixed, new_session, round_of, situation
from ..support.models import VOCAB_SIZE
from ..support.tiers import quick


@pytest.mark.parametrize("slope", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("num_tokens", [256, 2000])
def test_adaptive_costs_little_more_than_plain_decoding_on_bad_drafts(slope, num_tokens):
    run = Simulation(slope, lambda done, r: 0.02, says=lambda p: 0.9).run(num_tokens)
    dearest = max(round.seconds.total for round in run.rounds)
    assert run.seconds - run.tokens <= LOSS_SHARE * run.seconds + LOSS_START + dearest
    if slope < 0.5 or num_tokens > 256:
        assert run.seconds <= 1.02 * run.tokens
        assert any(round.depth for round in run.rounds[len(run.rounds) // 2 :])  # it keeps trying
    assert sum(not round.depth for round in run.rounds) > len(run.rounds) / 2


@pytest.mark.parametrize("slope", quick([0.005, 0.05, 0.2]))
@pytest.mark.parametrize(("is_asking", "has_values"), [(True, True), (False, True), (False, False)])
def test_adaptive_is_nearly_as_fast_as_the_best_fixed_tree(slope, is_asking, has_values):
    def sureness(done, generator):
        return 0.7

    options = {"is_asking": is_asking, "has_values": has_values}
    runs = [Simulation(slope, sureness, seed=seed, **options).run(3000) for seed in range(8)]
    rate = sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
    # Where nodes cost a fifth of a forward and nobody asks, exploring costs more than the loss bound forgives soon.
    least = 0.9 if (slope, is_asking, has_values) == (0.2, False, True) else 0.93
    assert rate > least * best_fixed(slope, sureness, children=1 + has_values)


@pytest.mark.parametrize("slope", [0.005, 0.05, 0.2])
def test_adaptive_beats_every_fixed_tree_if_rounds_differ(slope):
    """Half the rounds are sure, half are not, and the drafter says which: with a wrong number."""

    def sureness(done, generator):
        return generator.choice([0.95, 0.15])

    run = Simulation(slope, sureness).run(6000)
    assert run.rate > 1.05 * best_fixed(slope, sureness)


@pytest.mark.parametrize("level", [0.05, 0.3])
def test_adaptive_tries_padded_forwards_soon_within_the_loss_bound(level):
    """As recorded on a GPU: 8 nodes take little longer than one, which nobody knows before they were tried."""
    options = {"level": level, "widths": (1, 8, 16, 32, 64), "is_asking": False}
    good = Simulation(0.02, lambda done, r: 0.8, **options).run(64)
    assert next(index for index, round in enumerate(good.rounds) if round.depth) < 5
    assert good.rate > 1.3
    bad = Simulation(0.02, lambda done, r: 0.02, says=lambda p: 0.9, **options).run(400)
    assert bad.seconds <= 1.02 * bad.tokens


def test_adaptive_judges_the_rows_of_a_batch_together():
    """One row drafts well and one badly: what pays is the sum."""
    policy = new_session(batch_size=2)
    good, bad = TreeRow([5, 1, 2], [-1, 0, 1], [0.0, -0.05, -0.1]), TreeRow([5, 3, 4], [-1, 0, 1], [0.0, -3.0, -6.0])
    plain = DraftTree.from_rows([([5], [-1])] * 2)
    for _ in range(3):
        policy.choose(situation(0, 1))
        policy.learn(round_of(plain, [[], []], 1.0))
    for _ in range(20):
        policy.choose(situation(0, 1))
        both = DraftTree.from_rows([good, bad])
        policy.learn(round_of(both, [[1, 2], []], 1.5))
    assert policy.choose(situation(0, 1)) != NOTHING
    assert policy.num_nodes() == 2, "draft nodes of a row, in the rounds with a draft"
    assert policy.cut(both).num_nodes == 3
    policy.choose(Situation((1,), num_scored=2, context=0))
    assert policy.cut(both).num_nodes == 1


def test_cut_keeps_the_best_nodes_of_a_row():
    """A static tree comes in the order of its levels; what its values say counts."""
    policy = new_session()
    for seconds in (1.0, 1.0, 1.0):
        policy.choose(situation())
        policy.learn(round_of(ROOT, [[]], seconds))
    policy.choose(situation())
    static = DraftTree.from_rows([TreeRow([5, 1, 2, 3], [-1, 0, 0, 1], [0.0, -0.1, -7.5, -0.15])])
    assert policy.cut(static).host.token_ids == [[5, 1, 3]]


@pytest.fixture
def clock(monkeypatch, tiny_model):
    clock = ForwardClock(monkeypatch, tiny_model())
    yield clock
    clock.hook.remove()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_adaptive_stops_bad_drafts_and_keeps_the_text(clock, tiny_model, batch_size):
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


def test_adaptive_keeps_good_drafts_and_remembers_them(clock, tiny_model, prompt):
    model, ids = tiny_model(), prompt(12)
    plain = model.generate(ids, max_new_tokens=128)
    drafter = ScriptedDrafter(plain[:, 12:], (2, 1, 1, 1), accuracy=1.0, vocab_size=VOCAB_SIZE)
    speculator = Speculator(drafter, adaptive=True)
    assert torch.equal(model.generate(ids, max_new_tokens=128, speculator=speculator), plain)
    assert speculator.stats.rounds_without_draft <= 3  # two to see what plain decoding costs, one for the last token
    speculator.stats.reset()
    model.generate(ids, max_new_tokens=128, speculator=speculator)
    assert speculator.stats.rounds_without_draft <= 1
    assert speculator.stats.mean_acceptance_length > 4


class TestContext:
    """Rounds whose nodes cost more the longer the context: at 8000 a wide tree loses, at 200 it wins."""

    TREE = DraftTree.from_rows(
        [TreeRow(range(16), [-1, 0, 0, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13], [-0.2 * n for n in range(16)])]
    )

    @staticmethod
    def seconds(nodes, context):
        return 1 + context / 8000 + nodes * (0.02 + 0.4 * context / 8000)

    def rounds(self, policy, count, context):
        """Nodes of rounds in which every draft is accepted to its fourth level."""
        found = []
        for _ in range(count):
            if policy.choose(situation(context=context)) == NOTHING:
                policy.learn(round_of(ROOT, [[]], self.seconds(0, context)))
                found.append(0)
                continue
            tree = policy.cut(self.TREE)
            path = [node for node in (1, 3, 5, 7) if node < tree.num_nodes]
            policy.learn(round_of(tree, [path], self.seconds(tree.num_nodes - 1, context), depth=8))
            found.append(tree.num_nodes - 1)
        return found

    def test_adaptive_shrinks_trees_for_a_longer_context(self):
        policy = new_session()
        assert min(self.rounds(policy, 60, context=200)[-12:]) >= 7
        long = self.rounds(policy, 40, context=8000)
        assert long[0] == 0  # what plain decoding costs there
        assert sum(long[-20:]) < 7 * 20
        assert max(self.rounds(policy, 12, context=200)) >= 7

    def test_adaptive_keeps_drafting_after_a_delayed_round(self):
        policy = new_session()
        self.rounds(policy, 40, context=200)
        policy.choose(situation(context=200))
        policy.learn(round_of(policy.cut(self.TREE), [[1, 3]], 500.0))
        assert 0 not in self.rounds(policy, 20, context=200)


def test_adaptive_learns_no_costs_from_warm_up_rounds():
    policy = new_session()
    policy.choose(situation())
    for _ in range(3):
        policy.learn(round_of(ROOT, [[]], 500.0, is_warm_up=True))
    assert not policy._costs.rounds.knows(1)
    policy.learn(round_of(ROOT, [[]], 500.0))
    assert not policy._costs.rounds.knows(1), "libraries prepare a kernel in the first round"
    policy.learn(round_of(ROOT, [[]], 500.0))
    assert policy._costs.rounds.knows(1)


def test_adaptive_learns_acceptance_from_warm_up_rounds():
    policy = new_session()
    for _ in range(4):
        policy.learn(round_of(ROOT, [[]], 1.0))
    policy.choose(situation())
    drafted = DraftTree.from_rows([TreeRow([5, 7], [-1, 0], [0.0, -0.3])])
    (row,) = drafted.host.rows()
    before = policy.known.acceptance.probabilities(row)[1]
    for _ in range(9):
        policy.learn(round_of(drafted, [[1]], 500.0, is_warm_up=True))
    assert policy.known.acceptance.probabilities(row)[1] > before
    assert policy._costs.plain() == pytest.approx(1.0)


@pytest.mark.parametrize(("draft", "idle"), [(0.35, 0.05), (0.8, 0.05), (0.9, 0.4)])
def test_adaptive_uses_a_good_drafter_soon_with_captured_rounds(draft, idle):
    """The first two rounds of every kind take long and are not timed."""
    runs = [Recording(draft, 0.8, idle, seed).run(48) for seed in range(8)]
    assert sum(run.tokens for run in runs) / sum(len(run.rounds) for run in runs) > 2.2
    assert min(run.tokens / len(run.rounds) for run in runs) > 1.5


def test_adaptive_keeps_the_loss_bound_with_captured_drafts():
    run = Recording(0.9, 0.02, 0.4).run(256)
    timed = [round for round in run.rounds if not round.is_warm_up]
    seconds, tokens = sum(round.seconds.total for round in timed), sum(len(round.tokens[0]) for round in timed)
    step = COSTS[1] + run.idle
    assert seconds - tokens * step <= LOSS_SHARE * seconds + LOSS_START_PADDED * step


COSTS = {1: 1.0, 8: 1.14, 16: 1.25, 32: 1.4, 64: 1.7}  # by number of nodes


class Recording(Simulation):
    """Rounds on a GPU: their costs are those of an H200, relative to a step of the 0.5B shape.

    Args:
        draft: cost of a draft of four levels.
        sure: share of first children that are right.
        idle: cost of what the host does between any two rounds; it counts as drafting.
    """

    def __init__(self, draft, sure, idle, seed=0):
        super().__init__(0.0, lambda *_: sure, is_asking=False, seed=seed, widths=tuple(COSTS))
        self.cost, self.idle, self.known = draft, idle, Counter()

    def take(self, round):
        width, levels = (
            self.policy._costs.width(round.num_nodes),
            next(each for each in (0, 2, 4, 8) if each >= round.depth),
        )
        kinds = {("score", width), ("draft", levels)} - {("draft", 0)}
        self.known.update(kinds)
        drafting = self.idle + (self.cost * (0.4 + 0.15 * levels) if levels else 0.0)
        seconds = RoundSeconds(drafting=drafting, total=COSTS[width] + drafting)
        super().take(replace(round, seconds=seconds, is_warm_up=any(self.known[kind] <= 2 for kind in kinds)))


def test_adaptive_learns_costs_of_a_part_of_the_batch_apart():
    costs = RoundCosts()
    policy = new_session(costs, batch_size=4)
    policy.choose(situation(0, 1, 2, 3))
    of_four = DraftTree.from_rows([([5], [-1])] * 4)
    wide = DraftTree.from_rows([([5, *range(8)], [-1, *range(8)])] * 4)
    for tree, seconds in ((of_four, 1.0), (of_four, 1.0), (wide, 1.8)):
        policy.learn(round_of(tree, [[]] * 4, seconds))
    before = costs.plain(), costs.verifying(8)
    policy.choose(situation(2))
    assert policy._costs.rounds.knows(1), "what the whole batch costs tells enough to draft at once"
    for _ in range(5):
        policy.learn(replace(round_of(of_four, [[]] * 4, 0.25), tokens=[[], [], [99], []]))
    assert policy._costs.plain() == pytest.approx(0.25)
    assert policy._costs.verifying(8) == pytest.approx(0.25 * before[1] / before[0])  # stretched by what was seen
    assert (costs.plain(), costs.verifying(8)) == before


class Stumbling(Simulation):
    """The first drafts take `slow` rounds' time, as where a library is loaded; all others take what they say."""

    def __init__(self, slow, num_slow, **options):
        super().__init__(0.02, lambda _tokens, _random: 0.9, **options)
        self.slow, self.num_slow = slow, num_slow

    def take(self, round):
        if round.depth and self.num_slow:
            self.num_slow -= 1
            seconds = RoundSeconds(drafting=self.slow, total=round.seconds.total + self.slow)
            round = replace(round, seconds=seconds)
        super().take(round)


def drafted(simulation):
    return [number for number, round in enumerate(simulation.rounds) if round.depth]


def test_adaptive_ignores_a_slow_first_draft():
    simulation = Stumbling(slow=30.0, num_slow=1).run(64)
    first, second, *others = drafted(simulation)
    assert second == first + 1
    assert len(others) > 0.9 * len(simulation.rounds[second + 1 :])


def test_adaptive_drafts_again_after_two_slow_drafts():
    simulation = Stumbling(slow=30.0, num_slow=2).run(600)
    _, second, third, *others = drafted(simulation)
    assert 40 < third - second < 90, "it waits until it can pay for another one"
    assert len(others) > 0.8 * len(simulation.rounds[third:])
