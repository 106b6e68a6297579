"""Simulated decoding with the adaptive policy, where rounds and forwards take what they are said to."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch

from hf_speculate.drafting import Calibration
from hf_speculate.loop import meter
from hf_speculate.policy import NOTHING, Acceptance, Situation
from hf_speculate.policy.adaptive import LOSS_START, LOSS_START_PADDED, AdaptiveSession, Known
from hf_speculate.policy.costs import RoundCosts
from hf_speculate.tree import DraftTree, Round, RoundSeconds, TreeRow


def situation(*rows, context=0, num_unread=0):
    """These rows take part (the first, if none is named), and no others are run."""
    return Situation(rows or (0,), num_scored=len(rows) or 1, context=context, num_unread=num_unread)


def new_session(costs=None, batch_size=1):
    costs = costs or RoundCosts()
    balance = LOSS_START_PADDED if costs.widths else LOSS_START
    return AdaptiveSession(costs, Known(Acceptance(Calibration()), balance=balance), batch_size)


def round_of(tree, paths, seconds, drafting_seconds=0.0, depth=None, reading_seconds=0.0, **fields):
    """A round over a tree in which the nodes of `paths` (root left out) were accepted; the target's own token is 99."""
    found = [[0, *path] for path in paths]
    tokens = [[*(tree.host.token_ids[r][node] for node in path[1:]), 99] for r, path in enumerate(found)]
    return Round(
        tree=tree,
        paths=found,
        tokens=tokens,
        num_accepted=[len(path) for path in paths],
        lengths=[9] * len(paths),
        context=9,
        depth=tree.max_depth if depth is None else depth,
        seconds=RoundSeconds(drafting_seconds, seconds, reading_seconds),
        **fields,
    )


ROOT = DraftTree.from_rows([TreeRow([5], [-1], [0.0])])


class Simulation:
    """Decoding one row with a drafter that goes level by level.

    Every round has a sureness p: the better one of two children is right so often, the other one with p (1 - p) / 2.
    The drafter says p' instead of p, which is wrong, but grows with p.

    Args:
        slope: seconds of a node; a plain round takes 1.
        sureness: draws p for the text so far.
        says: p -> p'.
        is_asking: whether the drafter asks before every level; else it goes to the budget's depth.
        has_values: whether its trees have values; without, they are chains, as the order of nodes says what is best.
        level: seconds of a level.
        seed: of what is right.
        widths: numbers of nodes to which forwards are padded; empty if they are not.
    """

    DEPTH = 6

    def __init__(self, slope, sureness, says=math.sqrt, is_asking=True, has_values=True, level=0.1, seed=0, widths=()):
        self.slope, self.sureness, self.says = slope, sureness, says
        self.is_asking, self.has_values = is_asking, has_values
        self.level = level
        self.policy, self.random = new_session(RoundCosts(widths=widths)), random.Random(seed)
        self.seconds, self.tokens, self.rounds = 0.0, 0, []

    def run(self, num_tokens):
        while self.tokens < num_tokens:
            budget = self.policy.choose(situation())
            if budget == NOTHING:
                self.take(round_of(ROOT, [[]], 1.0))
            else:
                self.draft(min(self.DEPTH if budget.max_depth is None else budget.max_depth, self.DEPTH))
        return self

    def draft(self, max_depth):
        sure = self.sureness(self.tokens, self.random)
        tokens, parents, values, depth, last = [5], [-1], [0.0], 0, 0
        right = []  # the nodes that the target would choose, one after the other
        alive = True
        should_continue = self.policy.early_stopping()
        while depth < max_depth and (depth == 0 or not self.is_asking or should_continue(torch.tensor([values[-2:]]))):
            depth += 1
            drawn = self.random.random()
            for child, share in enumerate((sure, sure * (1 - sure) / 2)[: 1 + self.has_values]):
                tokens.append(10 + child)
                parents.append(last)
                said = self.says(sure) * (1.0 if child == 0 else (1 - self.says(sure)) / 2)
                values.append(values[last] + math.log(max(said, 1e-9)))
                if alive and (drawn < sure if child == 0 else sure <= drawn < sure + share):
                    right.append(len(tokens) - 1)
            # Only what follows the better child goes on.
            better = len(tokens) - 1 - self.has_values
            alive, last = alive and right[-1:] == [better], better
        row = TreeRow(tokens, parents, values if self.has_values else None)
        whole = DraftTree.from_rows([row])
        tree = self.policy.cut(whole)
        kept = list(map(tuple, self.paths(tree)))
        path = []
        for node in right:
            place = kept.index(tuple(self.path(row, node))) if tuple(self.path(row, node)) in kept else None
            if place is None:
                break
            path.append(place)
        width = self.policy._costs.width(tree.num_nodes - 1)
        seconds = 1 + self.slope * (width - 1) + self.level * depth
        self.take(round_of(tree, [path], seconds, self.level * depth, depth))

    @staticmethod
    def path(row, node):
        found = []
        while node > 0:
            found.insert(0, row.token_ids[node])
            node = row.parents[node]
        return found

    def paths(self, tree):
        row = tree.host.rows()[0]
        return [self.path(row, node) for node in range(len(row.parents))]

    def take(self, round):
        self.policy.learn(round)
        self.seconds += round.seconds.total
        self.tokens += len(round.tokens[0])
        self.rounds.append(round)

    @property
    def rate(self):
        return self.tokens / self.seconds


class BusySimulation(Simulation):
    """Decoding on a machine that other processes use now and then: all rounds then take 2.5 times as long.

    Args:
        num_rounds: mean number of rounds between two changes.

    Attributes:
        seconds_alone: seconds that the rounds would have taken on a quiet machine.
    """

    def __init__(self, *args, num_rounds=20, seed=0, **options):
        super().__init__(*args, seed=seed, **options)
        self.num_rounds, self.is_busy, self.others, self.seconds_alone = num_rounds, False, random.Random(~seed), 0.0

    def take(self, round):
        if self.others.random() < 1 / self.num_rounds:
            self.is_busy = not self.is_busy
        slowness = (2.5 if self.is_busy else 1.0) * (1 + 0.05 * self.others.expovariate(1))
        self.seconds_alone += round.seconds.total
        seconds = RoundSeconds(round.seconds.drafting * slowness, round.seconds.total * slowness)
        super().take(replace(round, seconds=seconds))


def best_fixed(slope, sureness, children=2, num_rounds=3000, level=0.1):
    """Tokens per second of the best tree that is always the same."""
    generator, rates = random.Random(1), []
    sures = [sureness(0, generator) for _ in range(num_rounds)]
    for depth in range(1, Simulation.DEPTH + 1):
        for both in range(1, children + 1):
            extra = (both - 1) / 2
            tokens = sum(1 + sum(p**d * (p + extra * p * (1 - p)) for d in range(depth)) for p in sures)
            rates.append(tokens / num_rounds / (1 + slope * depth * both + level * depth))
    return max(1.0, *rates)


class ForwardClock:
    """Stands in for the clock: a forward over one node takes a second, each further node `slope` of one."""

    def __init__(self, monkeypatch, model, slope=0.1):
        self.now, self.slope = 0.0, slope
        monkeypatch.setattr(meter.time, "perf_counter", lambda: self.now)
        self.hook = model.register_forward_pre_hook(self.tick, with_kwargs=True)

    def tick(self, _module, _args, kwargs):
        self.now += 1 + self.slope * (kwargs["input_ids"].shape[1] - 1)
