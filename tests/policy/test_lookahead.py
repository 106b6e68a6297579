"""Whether drafting ahead pays, from times that are given."""

from __future__ import annotations

import pickle

import pytest

from hf_speculate.policy import Lookahead, Pace, PolicyRequest


def choices(seconds, num_rounds, tokens=None, pace=None):
    """What is chosen in so many rounds that take `seconds[ahead]` and bring `tokens[ahead]`."""
    pace, made = pace or Pace("auto"), []
    for _ in range(num_rounds):
        made.append(pace.choose())
        pace.learn(made[-1], seconds[made[-1]], 2 if tokens is None else tokens[made[-1]])
    return made, pace


@pytest.mark.parametrize("is_faster", [True, False])
def test_what_is_faster_is_chosen_and_the_other_tried_now_and_then(is_faster):
    made, _ = choices({is_faster: 1.0, not is_faster: 1.2}, 2000)
    assert {made[:16].count(kind) for kind in (True, False)} == {8}
    share = made[16:].count(is_faster) / len(made[16:])
    assert 0.95 < share < 0.99


def test_tokens_count_too():
    made, pace = choices({True: 1.0, False: 1.2}, 400, tokens={True: 2.0, False: 3.0})
    assert made[16:].count(False) > 0.9 * len(made[16:])
    assert pace.ratio == pytest.approx(1.25, rel=0.01)


def test_a_machine_that_changes_is_noticed():
    _, pace = choices({True: 1.0, False: 1.5}, 400)
    made, _ = choices({True: 2.0, False: 1.5}, 2000, pace=pace)
    assert made[1000:].count(False) > 0.9 * 1000


@pytest.mark.parametrize("ahead", [True, False])
def test_who_says_it_is_believed(ahead):
    made, _ = choices({ahead: 9.0, not ahead: 1.0}, 50, pace=Pace(ahead))
    assert set(made) == {ahead}


def test_requests_that_are_alike_share_what_is_known(tiny_model):
    model, lookahead = tiny_model(), Lookahead("auto")
    first = lookahead.start(PolicyRequest(target=model, batch_size=1))
    assert lookahead.start(PolicyRequest(target=model, batch_size=1)) is first
    assert lookahead.start(PolicyRequest(target=model, batch_size=1, samples=True)) is not first
    assert lookahead.start(PolicyRequest(target=tiny_model(seed=1), batch_size=1)) is not first
    assert Lookahead(False).start(PolicyRequest(target=model, batch_size=1)) is None
    assert pickle.loads(pickle.dumps(lookahead)).ahead == "auto"
