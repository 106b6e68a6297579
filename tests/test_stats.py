"""Statistics: their definitions, on an example that was computed by hand; the summary, the verdict, the one warning."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from hf_speculate import AutoSpeculator, SpeculationStats
from hf_speculate.stats import Advice, HeadRecord, of_heads

from .support.inputs import random_prompt
from .support.models import build_tiny_model


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


OF_HEADS = of_heads(HeadRecord())
OWN = HeadRecord(is_own_target=True, accuracy=0.54)


def counted(
    accepted: int,
    drafted: int,
    with_draft: float,
    without: float,
    rounds: int = 60,
    overhead: float = 0.0,
    **told: Any,
) -> SpeculationStats:
    """`rounds` rounds that accept so much of a chain, after ten without a draft; seconds of each kind, and between."""
    stats = SpeculationStats(**({"calls": 1, "prefill_tokens": 1, "drafter": "eagle", "advice": OF_HEADS} | told))
    for _ in range(rounds):
        stats.record_round(drafted, drafted, accepted + 1, accepted)
    for _ in range(10):
        stats.record_round(0, 0, 1, 0)
    stats.plain_steps = float(stats.emitted_tokens)
    stats.round_seconds_with_draft = [with_draft] * rounds
    stats.round_seconds_without_draft = [without] * 10
    stats.target_seconds = 0.75 * rounds * with_draft + 10 * without
    stats.drafter_seconds = 0.25 * rounds * with_draft
    stats.total_seconds = stats.target_seconds + stats.drafter_seconds + overhead
    return stats


def test_the_summary_says_what_was_accepted_where_time_went_and_how_the_speedup_was_got():
    stats = counted(accepted=2, drafted=4, with_draft=0.02, without=0.01)
    stats.fallbacks["beams"] += 3
    lines = stats.summary().splitlines()
    assert lines[0] == "eagle: 1 call, 191 tokens, 146.9 tokens/s"
    assert "2.71 over all 70; 3.00 in the 60 with a draft" in lines[1]
    bars = [line.count("█") for line in lines[2:5]]
    assert bars == [24, 24, 0], "two of four depths are always accepted; nothing is drawn below the first empty one"
    assert "target 77%, drafter 23%, prompt 0%, rest 0%" in lines[5]
    # 190 steps of 10 ms in 1.3 s
    assert "about 1.46x after the prompt" in lines[6]
    assert "10 rounds without a draft (10.0 ms)" in lines[6]
    assert "beams (3x)" in lines[7]
    assert "this head fits the target." in lines[8]
    assert str(stats) == stats.summary()


@pytest.mark.parametrize(("number", "told"), [(0, "no rounds"), (1, "only 1 round"), (3, "only 3 rounds")])
def test_without_enough_plain_rounds_no_speedup_is_claimed(number, told):
    """The first of a process are slow: one of 767 ms was said to make a speed-up of 16."""
    stats = counted(accepted=2, drafted=4, with_draft=0.02, without=0.01)
    stats.round_seconds_without_draft = [0.767] * number
    assert stats.estimated_speedup is None
    assert stats.break_even_length is None
    assert f"not known: {told} ran without a draft" in stats.summary()


def test_shares_by_depth_never_rise():
    """Few rounds had a node at depth 3: of these each was accepted, of all rounds one in four."""
    stats = SpeculationStats()
    for depth, accepted in ((1, 0), (1, 1), (2, 0), (3, 3)):
        stats.record_round(depth, depth, accepted + 1, accepted)
    assert stats.acceptance_rate_by_depth == {1: 0.5, 2: 0.5, 3: 1.0}
    assert stats.shares_by_depth == {1: 0.5, 2: 0.25, 3: 0.25}


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        (SpeculationStats(), "nothing was generated yet."),
        (counted(1, 4, 0.03, 0.01), "2.00 tokens per drafted round where 3.00 would make up for their cost"),
        (counted(0, 4, 0.01, 0.01), "1.00 tokens per drafted round"),
        (counted(2, 4, 0.02, 0.01), "this head fits the target."),
        (counted(2, 4, 0.0295, 0.01), "near break-even: 1.02x with 3.00 tokens per drafted round."),
        (
            counted(2, 4, 0.0275, 0.01, overhead=0.8),
            "do not pay here: 0.75x with 3.00 tokens per drafted round.",
        ),
        (counted(2, 4, 0.0275, 0.01, overhead=0.2), "near break-even: 0.97x with 3.00 tokens per drafted round."),
        (counted(0, 0, 0.01, 0.01), "no round had a draft."),
        (counted(2, 4, 0.02, 0.01, rounds=4), "too early to say: 4 rounds had a draft."),
    ],
    ids=[
        "nothing",
        "too dear",
        "nothing accepted",
        "fits",
        "even",
        "slower",
        "a little slower",
        "no drafts",
        "few drafts",
    ],
)
def test_verdict_describes_the_speedup(stats, said):
    assert said in stats.verdict


@pytest.mark.parametrize(
    ("record", "first", "sampled", "with_draft", "said"),
    [
        (OWN, 0.5, 0, 0.03, "as well as it should, but a token of this target is so cheap"),
        (OWN, 0.4, 1, 0.03, "Sampled text accepts less"),
        (OWN, 0.4, 1, 0.01, "it pays, but accepts little at depth 1 (0.40; 0.54 in training). Sampled text"),
        (OWN, 0.5, 1, 0.01, "this head fits the target."),
        (OWN, 0.2, 1, 0.03, "The target is the one that the head was trained for."),
        (OWN, 0.2, 0, 0.03, "text of another kind than its training texts?"),
        (replace(OWN, is_own_target=False), 0.2, 0, 0.03, "The head was trained for other weights"),
        (replace(OWN, is_own_target=None), 0.2, 0, 0.03, "Wrong target, template, adapter or quantisation?"),
        (HeadRecord(), 0.5, 0, 0.03, "Wrong target, template, adapter or quantisation?"),
    ],
)
def test_a_small_gain_is_explained_by_what_the_head_recorded(record, first, sampled, with_draft, said):
    """Tokens per round are the same; depth 1 tells whether the head or its cost is the matter."""
    stats = counted(2, 4, with_draft, 0.01, sampled_calls=sampled, advice=of_heads(record))
    stats.accepted_to_depth[1] = round(60 * first)
    stats.round_seconds_with_draft = [2 * with_draft] * 60
    stats.total_seconds = 60 * 2 * with_draft + 0.1
    if with_draft == 0.03:
        assert "would make up for their cost" in stats.verdict
        assert ("Wrong target" in stats.shortfall) == ("Wrong target" in said)
    assert said in stats.verdict


def test_shortfall_needs_enough_rounds():
    assert counted(1, 4, 0.03, 0.01, rounds=39).shortfall is None
    assert "hf-speculate doctor" in counted(1, 4, 0.03, 0.01, rounds=40).shortfall
    near = counted(2, 4, 0.03, 0.0097, rounds=60)
    assert "do not pay" in near.verdict
    assert near.shortfall is None, "times are not as sure as that"
    assert counted(2, 4, 0.02, 0.01, rounds=60).shortfall is None


def test_a_draft_model_that_costs_more_than_it_brings_is_named_once(monkeypatch):
    target, draft = build_tiny_model(), build_tiny_model(seed=7)
    draft.config.name_or_path = "org/other-small"
    speculator = AutoSpeculator.from_name("draft_model", target=target, model=draft, adaptive=False)
    warned = []
    monkeypatch.setattr("hf_speculate.speculator.speculator.logger.warning", warned.append)
    for _ in range(3):
        target.generate(random_prompt(12), speculator=speculator, max_new_tokens=60, do_sample=False, eos_token_id=None)
    assert speculator.stats.mean_acceptance_length < 1.05, "random weights agree on nothing"
    assert len(warned) == 1
    assert "The draft model org/other-small is too slow for this target" in warned[0]


def test_a_drafter_that_was_never_tried_is_not_called_slow():
    target, draft = build_tiny_model(), build_tiny_model(seed=7)
    draft.config.name_or_path = "org/small"
    drafter = AutoSpeculator.from_name("draft_model", target=target, model=draft).drafter
    said = counted(0, 0, 0.01, 0.01, advice=drafter.advice).verdict
    assert said.startswith("no round had a draft. The draft model org/small was not tried: the policy expected")
    lookup = AutoSpeculator.from_name("prompt_lookup", target=target).drafter
    assert counted(0, 0, 0.01, 0.01, advice=lookup.advice).verdict == f"no round had a draft. {lookup.advice.poor}"
    assert counted(0, 0, 0.01, 0.01).verdict == "no round had a draft."


def test_rounds_of_a_request_are_timed_with_and_without_a_draft():
    target = build_tiny_model()
    speculator = AutoSpeculator.from_name("prompt_lookup", target=target, adaptive=False)
    output = target.generate(
        random_prompt(12),
        speculator=speculator,
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    stats = output.speculation
    assert stats.drafter == "prompt_lookup"
    assert stats.advice == speculator.drafter.advice != Advice()
    assert len(stats.round_seconds_with_draft) == stats.rounds
    assert len(stats.round_seconds_without_draft) == stats.rounds_without_draft
    assert stats.plain_steps == stats.emitted_tokens == 39


def test_drafts_ahead_are_counted():
    stats = counted(accepted=2, drafted=4, with_draft=0.02, without=0.01)
    assert "drafts ahead" not in stats.summary()
    stats.count_ahead(0.3, 0.1, was_right=True)
    for _ in range(3):
        stats.count_ahead(0.5, 0.2, was_right=False)
    assert "25% of 4 were right: 0.20 s of drafting hidden, 1.50 s in vain" in stats.summary()
