"""Costs by size and context, and how observations correct them. No test here looks at a clock."""

from __future__ import annotations

import random

import pytest

from hf_speculate.policy.costs import RoundCosts, Timings, Typical


def timings_of(slope, *observed, repeats=3):
    """Seconds of some sizes, (size, seconds), each observed so often: the first time is a warm-up."""
    timings = Timings(lambda size: 1 + slope * size)
    for size, seconds in observed:
        for _ in range(repeats):
            timings.record(size, seconds)
    return timings


class TestTimings:
    def test_timings_are_nearly_linear_between_observations(self):
        timings = timings_of(0.02, (1, 1.0), (7, 2.0), (13, 2.6))
        assert timings.at(4) == pytest.approx(1.5, rel=0.05)
        assert timings.at(10) == pytest.approx(2.3, rel=0.05)
        assert timings.at(40) > timings.at(17)

    def test_timings_never_fall_with_size(self):
        timings = timings_of(0.0, (1, 1.0), (6, 3.0), (12, 2.0))
        assert timings.at(6) == timings.at(12) == pytest.approx(2.5)

    def test_timings_forget_a_warm_up_and_resist_outliers(self):
        timings = timings_of(0.02)
        for seconds in (50.0, 1.0, 1.0, 1.0, 1000.0):
            timings.record(1, seconds)
        assert timings.at(1) < 1.05

    def test_timings_retry_sizes_that_were_slow_at_first(self):
        """Libraries prepare a kernel for every new size: four times what it takes later."""
        timings = timings_of(0.02, (1, 1.0))
        for size in (5, 6, 7, 8):
            timings.record(size, 4.0)
        assert timings.at(8) < 2.6
        assert not timings.is_established(8)
        for _ in range(3):
            timings.record(6, 1.2)
        assert timings.at(8) < 1.3
        assert timings.is_established(8)

    def test_timings_of_all_sizes_follow_a_slowdown(self):
        timings = timings_of(0.02)
        for _ in range(8):
            timings.record(1, 1.0)
            timings.record(9, 2.0)
        for _ in range(60):
            timings.record(9, 4.0)
        assert timings.at(9) == pytest.approx(4.0, rel=0.1)
        assert timings.at(1) == pytest.approx(2.0, rel=0.3)
        timings.record(1, 2.0)
        assert timings.at(9) / timings.at(1) == pytest.approx(2.0, rel=0.3)  # and what one costs of the other stays

    def test_timings_learn_the_ratio_of_two_sizes(self):
        timings, generator = timings_of(0.02), random.Random(0)
        for _ in range(300):
            for size, seconds in ((1, 1.0), (4, 1.3)):
                timings.record(size, seconds * (1 + 0.05 * generator.random() + 2 * (generator.random() < 0.1)))
        assert timings.at(1) == pytest.approx(1.03, rel=0.05)
        assert timings.at(4) / timings.at(1) == pytest.approx(1.3, rel=0.04)

    def test_timings_learn_each_context_from_its_own_observations(self):
        timings = timings_of(0.02)
        for _ in range(10):
            timings.record(1, 1.0, context=100)
            timings.record(17, 1.5, context=100)
        before = timings.at(17, context=100)
        assert not timings.knows(1, context=8000)
        for _ in range(3):
            timings.record(1, 2.0, context=8000)
            timings.record(17, 6.0, context=8000)
        assert timings.at(1, context=8000) == pytest.approx(2.0, rel=0.05)
        assert timings.at(17, context=8000) == pytest.approx(6.0, rel=0.05)
        assert timings.at(17, context=100) == before  # what was known there stays


def test_typical_time_is_the_shortest_of_the_first_and_resists_outliers():
    typical = Typical()
    for seconds in (50.0, 1.2, 1.0):
        assert not typical.is_established
        typical.record(seconds)
    assert typical.is_established
    assert typical.seconds == 1.0
    typical.record(1000.0)
    assert typical.seconds == pytest.approx(1.02)
    for _ in range(200):
        typical.record(3.0)
    assert typical.seconds == pytest.approx(3.0)


def test_typical_time_skips_the_first_observation_once():
    typical = Typical()
    assert [typical.skip_cold() for _ in range(3)] == [True, False, False]
    typical = Typical()
    typical.record(1.0)
    assert not typical.skip_cold()


def test_reading_is_unknown_after_the_first_prompt_and_grows_with_its_length():
    costs = RoundCosts()
    costs.record_reading(40, 9.0)
    assert costs.reading(40) == 0.0
    costs.record_reading(40, 1.0)
    assert costs.reading(40) == pytest.approx(1.0)
    assert costs.reading(400) > 5 * costs.reading(40)
    assert RoundCosts(like=costs).reading(40) == costs.reading(40)


def test_round_costs_are_equal_for_trees_of_one_width():
    costs, plain = RoundCosts(widths=(1, 8, 16)), RoundCosts()
    assert [costs.width(nodes) for nodes in (0, 1, 7, 8, 15, 16)] == [1, 8, 8, 16, 16, 17]
    assert [plain.width(nodes) for nodes in (0, 1, 7)] == [1, 2, 8]
    for size, seconds in ((1, 1.0), (8, 1.2)):
        for _ in range(3):
            costs.rounds.record(size, seconds)
    assert costs.plain() == pytest.approx(1.0)
    assert costs.verifying(1) == costs.verifying(7) == pytest.approx(1.2)
    assert costs.loss_at_most(1, 1) == costs.loss_at_most(1, 7)
