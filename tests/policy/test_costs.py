"""Costs by size and context, and how observations correct them. No test here looks at a clock."""

from __future__ import annotations

import random

import pytest

from hf_speculate.policy.costs import RoundCosts, Timings, interpolate


class TestTimings:
    def test_between_observations_it_is_nearly_linear(self):
        timings = Timings(slope=0.02)
        for size, seconds in ((1, 1.0), (9, 2.0), (17, 1.8)):
            timings.record(size, seconds)
        assert timings.at(5) == pytest.approx(1.5, rel=0.03)
        assert timings.at(9) == pytest.approx(2.0)
        assert timings.at(13) == pytest.approx(1.9, rel=0.03)
        assert timings.at(40) > timings.at(17)

    def test_one_observation_is_extended_by_the_slope(self):
        timings = Timings(slope=0.1)
        timings.record(10, 2.0)
        assert timings.at(0) == pytest.approx(1.0)
        assert timings.at(20) == pytest.approx(3.0)

    def test_a_warm_up_is_forgotten_and_a_stray_value_moves_little(self):
        timings = Timings(slope=0.02)
        for seconds in (50.0, 1.0, 1.0, 1.0, 1000.0):
            timings.record(1, seconds)
        assert timings.at(1) < 1.2

    def test_what_slows_one_size_slows_all(self):
        timings = Timings(slope=0.02)
        for _ in range(4):
            timings.record(1, 1.0)
            timings.record(9, 2.0)
        for step in range(200):  # a context that grows
            timings.record(9, 2.0 + step / 100)
        assert timings.at(9) == pytest.approx(4.0, rel=0.1)
        assert timings.at(1) == pytest.approx(2.0**0.5, rel=0.1)

    def test_the_ratio_of_two_sizes_is_learnt_in_the_end(self):
        timings, generator = Timings(slope=0.02), random.Random(0)
        for _ in range(300):
            for size, seconds in ((1, 1.0), (4, 1.3)):
                timings.record(size, seconds * (1 + 0.05 * generator.random() + 2 * (generator.random() < 0.1)))
        assert timings.at(1) == pytest.approx(1.03, rel=0.04)
        assert timings.at(4) / timings.at(1) == pytest.approx(1.3, rel=0.04)

    def test_a_context_far_off_is_learnt_from_its_own_observations(self):
        timings = Timings(slope=0.02)
        for _ in range(10):
            timings.record(1, 1.0, context=100)
            timings.record(17, 1.5, context=100)
        assert not timings.knows(1, context=8000)
        timings.record(1, 2.0, context=8000)
        timings.record(17, 6.0, context=8000)
        assert timings.at(1, context=8000) == pytest.approx(2.0)
        assert timings.at(9, context=8000) == pytest.approx(3.75, rel=0.01)  # 1.25 before, stretched 3 times
        assert timings.at(17, context=100) == pytest.approx(1.5)  # what was known there stays

    def test_a_neighbouring_context_begins_with_what_is_known(self):
        timings = Timings(slope=0.02)
        for _ in range(10):
            timings.record(1, 1.0, context=500)
        assert timings.knows(1, context=520)
        timings.record(1, 9.0, context=520)
        assert timings.at(1, context=520) < 1.1  # a stray value moves little, also the first one there


def test_observations_correct_a_surface_everywhere():
    """A machine that is twice as slow as it was: one observation says so for all sizes and contexts."""
    costs = RoundCosts(rounds=lambda size, context: size + context / 1000)
    assert costs.plain(1000) == 2.0
    assert costs.rounds.knows(1, 1000)
    costs.rounds.record(9, 18.2, context=100)
    assert costs.plain(1000) == pytest.approx(4.0)
    assert costs.verifying(4, 100) == pytest.approx(10.2)


@pytest.mark.parametrize(
    ("points", "values", "point", "found"),
    [
        ((1,), (3.0,), 9, 3.0),
        ((1, 2), (3.0, 4.0), 1.5, 3.5),
        ((1, 2), (3.0, 4.0), 4, 4.0),
        ((1, 2), (3.0, 4.0), 0, 3.0),
    ],
)
def test_interpolation_and_its_ends(points, values, point, found):
    assert interpolate(points, values, point) == found
