"""Conditions are named where they make a clear difference over prompts, and only there."""

from __future__ import annotations

import pytest
import torch

from hf_speculate_plugins.calibration import Measured, compare_conditions, compare_context, compare_sets


def measured(*accepted, name="as it is used", starts=None, chains=20, depth=5):
    """Every prompt with the same number of accepted tokens in each of its chains."""
    tensors = tuple(torch.full((chains,), value) for value in accepted)
    return Measured(name, tensors, tuple(starts or [10] * len(accepted)), depth)


def compared(now, other):
    return compare_conditions("adapter", now, other, lower="is lower now", higher="is higher now")


class TestPairs:
    def test_the_sign_says_which_meaning(self):
        now, other = measured(1, 2, 3, 2), measured(2, 3, 4, 3, name="without it")
        found = compared(now, other)
        assert (found.kind, found.gain) == ("adapter", 1.0)
        assert found.sigmas == pytest.approx(20)
        assert found.message == (
            "3.00 tokens a round as it is used, 4.00 without it (1.00 apart, 20 sigma): is lower now"
        )
        assert {name: rates.mean_length for name, rates in found.acceptance.items()} == {
            "as it is used": 3.0,
            "without it": 4.0,
        }
        assert compared(other, now).message.endswith("is higher now")

    def test_prompts_are_paired(self):
        """Prompts differ far more than conditions do."""
        assert compared(measured(0, 1, 3, 5), measured(1, 2, 4, 6)) is not None
        assert compared(measured(0, 1, 3, 5), measured(6, 4, 2, 1)) is None

    def test_what_is_small_or_seen_on_few_prompts_is_not_named(self):
        assert compared(measured(1, 2, 3), measured(2, 3, 4)) is None
        now, other = ([torch.tensor([2] * 9 + [value])] * 8 for value in (2, 3))
        assert compared(Measured("a", tuple(now), (9,) * 8, 5), Measured("b", tuple(other), (9,) * 8, 5)) is None

    def test_prompts_after_which_too_little_was_written_do_not_count(self):
        now = Measured("a", (*measured(1, 2, 3, 2).accepted, torch.zeros(0, dtype=torch.long)), (10,) * 5, 5)
        assert compared(now, measured(2, 3, 4, 3, 5)).gain == 1.0
        assert compared(now, measured(2, 3, 4, 3, 5)).sigmas == pytest.approx(20)


class TestSets:
    def test_the_set_that_drafts_worse_is_named(self):
        (found,) = compare_sets(measured(3, 4, 3, 4, 1, 1, 0, 2), {"code": [0, 1, 2, 3], "german": [4, 5, 6, 7]})
        assert found.message.startswith("2.00 tokens a round on prompts 'german', 4.50 on the others (2.50 apart")
        assert "another language or domain" in found.message

    def test_sets_that_scatter_are_not(self):
        assert compare_sets(measured(0, 5, 0, 5, 1, 5, 0, 4), {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}) == []
        assert compare_sets(measured(3, 4, 4, 1), {"a": [0, 1, 2], "b": [3]}) == []


class TestContext:
    def long(self, before, after):
        accepted = torch.tensor([before] * 10 + [after] * 10)
        return Measured("as it is used", (accepted,) * 6, (90,) * 6, 5)

    def test_beyond_what_was_trained(self):
        found = compare_context(self.long(3, 1), 100, "the length that it was trained with")
        figures = "2.00 tokens a round from position 100 on, 4.00 before position 100 (2.00 apart, 35 sigma)"
        assert found.message == f"{figures}: 100 is the length that it was trained with."
        assert {rates.num_positions for rates in found.acceptance.values()} == {60}

    @pytest.mark.parametrize("limit", [10, 105, 1000])
    def test_nothing_on_one_side_or_no_difference(self, limit):
        assert compare_context(self.long(3, 3), limit, "a limit") is None
        assert limit == 105 or compare_context(self.long(3, 1), limit, "a limit") is None
