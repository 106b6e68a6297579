"""Costs by size and context: surfaces, and how observations correct them. No test here looks at a clock."""

from __future__ import annotations

import random

import pytest

from hf_speculate.costs import CostSurface, RoundCosts, Timings, interpolate


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


SURFACE = CostSurface((100, 1000), (1, 5, 9), ((1.0, 2.0, 4.0), (2.0, 5.0, 9.0)))


class TestCostSurface:
    def test_it_is_bilinear_on_the_grid_and_extended_beyond(self):
        assert SURFACE(1, 100) == 1.0
        assert SURFACE(9, 1000) == 9.0
        assert SURFACE(3, 550) == pytest.approx((1.5 + 3.5) / 2)
        assert SURFACE(13, 100) == pytest.approx(6.0)
        assert SURFACE(1, 1900) == pytest.approx(3.0)

    def test_an_extension_never_costs_nothing(self):
        falling = CostSurface((100, 200), (1,), ((2.0,), (1.0,)))
        assert falling(1, 5000) == pytest.approx(0.1)

    def test_json_gives_it_back(self):
        assert CostSurface.from_json(SURFACE.to_json()) == SURFACE

    @pytest.mark.parametrize(
        "change",
        [
            {"contexts": [1000, 100]},
            {"sizes": [1, 5]},
            {"sizes": []},
            {"seconds": [[1.0, 2.0, 4.0]]},
            {"seconds": [[1.0, 2.0, float("nan")], [2.0, 5.0, 9.0]]},
            {"seconds": [[1.0, 2.0, -4.0], [2.0, 5.0, 9.0]]},
        ],
    )
    def test_a_broken_table_is_refused(self, change):
        with pytest.raises(ValueError, match=r"contexts|sizes|seconds"):
            CostSurface.from_json({**SURFACE.to_json(), **change})

    def test_observations_correct_it_everywhere(self):
        """A machine that is twice as slow as it was: one observation says so for all sizes and contexts."""
        costs = RoundCosts(rounds=SURFACE)
        assert costs.plain(1000) == 2.0
        assert costs.rounds.knows(1, 1000)
        costs.rounds.record(9, 8.0, context=100)
        assert costs.plain(1000) == pytest.approx(4.0)
        assert costs.verifying(4, 100) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("points", "values", "point", "extend", "found"),
    [((1,), (3.0,), 9, True, 3.0), ((1, 2), (3.0, 4.0), 4, True, 6.0), ((1, 2), (3.0, 4.0), 4, False, 4.0)],
)
def test_interpolation_at_the_ends(points, values, point, extend, found):
    assert interpolate(points, values, point, extend=extend) == found
