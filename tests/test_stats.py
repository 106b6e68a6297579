"""Statistics: the definitions, on an example that was computed by hand."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from hf_speculate import SpeculationStats


@pytest.fixture
def stats():
    """Four rounds with a draft, two without.

    round  drafted  depth  emitted  accepted
    1      6        3      4        3         all accepted, and a bonus token
    2      6        3      1        0         nothing accepted: the bonus token alone
    3      4        2      2        1
    4      3        3      2        2         stopped inside the accepted path: no bonus token
    """
    stats = SpeculationStats(calls=1, prefill_tokens=1, target_forwards=6)
    stats.record_round(num_drafted=6, depth=3, num_emitted=4, num_accepted=3)
    stats.record_round(num_drafted=6, depth=3, num_emitted=1, num_accepted=0)
    stats.record_round(num_drafted=4, depth=2, num_emitted=2, num_accepted=1)
    stats.record_round(num_drafted=3, depth=3, num_emitted=2, num_accepted=2)
    for _ in range(2):
        stats.record_round(num_drafted=0, depth=0, num_emitted=1, num_accepted=0)
    stats.prefill_seconds, stats.drafter_prefill_seconds = 2.0, 0.5
    stats.target_seconds, stats.drafter_seconds, stats.total_seconds = 6.0, 1.5, 10.5
    stats.fallbacks["chains only"] += 1
    return stats


def counter_names():
    return [each.name for each in fields(SpeculationStats) if each.name != "advice"]


def test_counts_keep_rounds_without_a_draft_apart(stats):
    assert (stats.rounds, stats.rounds_without_draft) == (4, 2)
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.rejected_tokens) == (19, 6, 13)
    assert (stats.bonus_tokens, stats.emitted_tokens) == (3, 11)


def test_mean_acceptance_length_counts_the_bonus_token_and_only_rounds_with_a_draft(stats):
    assert stats.mean_acceptance_length == (4 + 1 + 2 + 2) / 4


def test_acceptance_rate_by_depth_is_unconditional(stats):
    # Depth 1: rounds 1, 3, 4 of four. Depth 2: rounds 1, 4 of four. Depth 3: round 1 of the three that were as deep.
    assert stats.acceptance_rate_by_depth == {1: 3 / 4, 2: 2 / 4, 3: 1 / 3}


def test_efficiency_leaves_the_prefill_out(stats):
    assert stats.rest_seconds == 0.5
    assert stats.engine_efficiency == 7.5 / 8.0


def test_merge_adds_everything(stats):
    stats.round_seconds_with_draft, stats.plain_steps = [0.5, 0.25], 11.0
    total = SpeculationStats()
    total.merge(stats)
    assert total == stats
    total.merge(stats)
    for name in counter_names():
        value = getattr(stats, name)
        doubled = {key: 2 * count for key, count in value.items()} if hasattr(value, "items") else 2 * value
        assert getattr(total, name) == doubled, name
    assert total.mean_acceptance_length == stats.mean_acceptance_length


def test_reset_forgets_everything_in_place(stats):
    histogram = stats.accepted_histogram
    stats.reset()
    assert stats == SpeculationStats()
    assert histogram, "what was handed out before must not change"


def test_all_figures_survive_json(stats):
    figures = stats.to_dict()
    loaded = json.loads(json.dumps(figures))
    assert set(counter_names()) < set(figures)
    assert figures["verdict"] == stats.verdict
    assert loaded["mean_acceptance_length"] == stats.mean_acceptance_length
    assert loaded["accepted_histogram"] == {"0": 1, "1": 1, "2": 1, "3": 1}
    assert loaded["fallbacks"] == {"chains only": 1}
    assert loaded["engine_efficiency"] == stats.engine_efficiency
