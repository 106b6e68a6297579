"""The adaptive policy on a machine that other processes use, in simulated decoding."""

from __future__ import annotations

import pytest

from ..support.decoding import Simulation, best_fixed, round_of


class BusyMachine(Simulation):
    """Work is interrupted at random, on average once in 1.4 one-token forwards and for 1.5 of them.

    `work` is what everything would have taken without. As interruptions hit all work alike, it judges a policy.

    Args:
        busy_rounds: number of rounds after which the others have ended.
    """

    def __init__(self, *args, busy_rounds=10**6, **options):
        super().__init__(*args, **options)
        self.busy_rounds, self.work = busy_rounds, 0.0

    def take(self, round):
        self.work += round.seconds.total
        drafting = self._interrupted(round.seconds.drafting)
        rest = self._interrupted(round.seconds.total - round.seconds.drafting)
        paths = [path[1:] for path in round.paths]
        super().take(round_of(round.tree, paths, drafting + rest, drafting, round.depth))

    def _interrupted(self, work):
        seconds = work
        while len(self.rounds) < self.busy_rounds and (begin := self.random.expovariate(0.7)) < work:
            work -= begin
            seconds += self.random.expovariate(1 / 1.5)
        return seconds


def runs_of(acceptance, num_tokens, level=0.1, **options):
    sureness, says = (lambda done, generator: acceptance), (lambda p: 0.7)
    return [
        BusyMachine(0.05, sureness, says, level=level, seed=seed, **options).run(num_tokens) for seed in range(16)
    ], best_fixed(0.05, sureness, level=level)


@pytest.mark.parametrize("busy_rounds", [10**6, 60], ids=["throughout", "at first"])
def test_a_call_that_begins_on_a_busy_machine_is_nearly_as_fast_as_the_best_fixed_tree(busy_rounds):
    runs, best = runs_of(0.8, 384, busy_rounds=busy_rounds)
    assert sum(run.tokens for run in runs) >= 0.9 * best * sum(run.work for run in runs)
    assert min(run.tokens / run.work for run in runs) >= 0.7 * best


def test_bad_drafts_cost_little_on_a_busy_machine_too():
    runs, _ = runs_of(0.1, 384, level=0.25)
    assert sum(run.work for run in runs) <= 1.03 * sum(run.tokens for run in runs)
