"""Costs that are kept between processes, and files of them that nobody should believe."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from hf_speculate.policy import Adaptive, PolicyRequest, Situation
from hf_speculate.policy.costs import RoundCosts
from hf_speculate.policy.kept import KeptCosts
from hf_speculate.policy.machine import CpuSeconds, OtherProcesses


def costs_of(plain, per_node, level):
    costs = RoundCosts()
    for context in (0, 1500):
        for _ in range(3):
            for size in (1, 3, 9):
                costs.rounds.record(size, plain + per_node * (size - 1), context)
            costs.drafting.record(2, 2 * level, context)
    return costs


@pytest.fixture
def request_(tmp_path, monkeypatch, tiny_model):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_SPECULATE_KEEP_COSTS", "1")
    monkeypatch.setattr(OtherProcesses, "are_in_the_way", lambda others: False)
    return PolicyRequest(target=tiny_model(), batch_size=1, drafter="some")


def write(request, costs):
    kept = KeptCosts(request)
    kept.rounds, kept.drafting = costs.rounds, costs.drafting
    keep(kept)
    return kept


def keep(kept):
    kept.keep()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and "_write" in thread.name:
            thread.join()


def is_known(request):
    return KeptCosts(request).rounds.knows(1)


def written(tmp_path):
    return list((tmp_path / "hf_speculate").glob("*.json"))


def test_what_was_kept_is_what_is_read(request_):
    assert not is_known(request_)
    write(request_, costs_of(0.02, 0.001, 0.004))
    costs = KeptCosts(request_)
    for context in (100, 2000):
        assert costs.plain(context) == pytest.approx(0.02, rel=0.05)
        assert costs.verifying(8, context) == pytest.approx(0.028, rel=0.05)
        assert costs.drafting_to(2, context) == pytest.approx(0.008, rel=0.05)


def test_a_fresh_process_drafts_in_its_first_round_and_learns_how_fast_the_machine_is_now(request_):
    write(request_, costs_of(0.02, 0.001, 0.004))
    session = Adaptive().start(request_)
    budget = session.choose(Situation((0,), 1, 100))
    assert not budget.is_nothing
    for _ in range(3):
        session._costs.rounds.record(1, 0.06, 100)
    assert session._costs.verifying(8, 100) == pytest.approx(0.084, rel=0.1)


def test_other_drafters_and_batches_have_costs_of_their_own(request_, tmp_path):
    write(request_, costs_of(0.02, 0.001, 0.004))
    for other in ({"drafter": "other"}, {"batch_size": 2}, {"drafter": ""}):
        assert not is_known(PolicyRequest(**{**vars(request_), **other}))
    assert len(written(tmp_path)) == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"rounds": 3, "drafting": [], "asking": []}',
        '{"rounds": [[0, 1, 1.0], [0, 4, NaN]], "drafting": [], "asking": []}',
        '{"rounds": [[0, 1, 1.0], [0, 4, -0.1]], "drafting": [], "asking": []}',
        '{"rounds": [[0, 1, 1.0], [0, 4, 1e9]], "drafting": [], "asking": []}',
        '{"rounds": [[0, 1, 1.0], [0, 0, 1.0]], "drafting": [], "asking": []}',
        '{"rounds": [[0, 1, 1.0], [0, 4]], "drafting": [], "asking": []}',
        '{"rounds": [], "drafting": [], "asking": []}',
        '{"rounds": [[0, 1, 1.0], [0, 4, "x"]], "drafting": [], "asking": []}',
        json.dumps({"rounds": [[0, 1, 1.0]] * 9000, "drafting": [], "asking": []}),
    ],
)
def test_odd_files_are_passed_over(request_, tmp_path, content):
    write(request_, costs_of(0.02, 0.001, 0.004))
    (file,) = written(tmp_path)
    file.write_text(content)
    assert not is_known(request_)


@pytest.mark.filterwarnings("error")  # of threads
def test_a_folder_that_cannot_be_written_is_passed_over(request_, tmp_path):
    (tmp_path / "hf_speculate").write_text("a file")
    write(request_, costs_of(0.02, 0.001, 0.004))
    assert not is_known(request_)


def test_the_switch_keeps_nothing(request_, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_SPECULATE_KEEP_COSTS", "0")
    write(request_, costs_of(0.02, 0.001, 0.004))
    assert not written(tmp_path)


def test_who_has_learnt_less_replaces_nothing(request_, tmp_path):
    plain = RoundCosts()
    for _ in range(3):
        plain.rounds.record(1, 0.05, 100)
    write(request_, plain)
    assert not written(tmp_path), "it has not drafted"
    write(request_, costs_of(0.02, 0.001, 0.004))
    for _ in range(3):
        plain.drafting.record(1, 0.01, 100)
    write(request_, plain)
    assert KeptCosts(request_).plain(100) == pytest.approx(0.02, rel=0.05)
    write(request_, costs_of(0.03, 0.001, 0.004))
    assert KeptCosts(request_).plain(100) == pytest.approx(0.03, rel=0.05)


@pytest.mark.parametrize("are_in_the_way", [True, None])
def test_costs_of_a_busy_hour_are_not_kept(request_, tmp_path, monkeypatch, are_in_the_way):
    monkeypatch.setattr(OtherProcesses, "are_in_the_way", lambda others: are_in_the_way)
    kept = write(request_, costs_of(0.02, 0.001, 0.004))
    assert not written(tmp_path)
    monkeypatch.setattr(OtherProcesses, "are_in_the_way", lambda others: False)
    keep(kept)
    assert bool(written(tmp_path)) == (are_in_the_way is None), "a minute later at the earliest"


@pytest.mark.parametrize(
    ("seconds", "others", "own", "expected"),
    [
        (10.0, 2.0, 20.0, False),
        (10.0, 19.0, 20.0, False),  # two of four cores are left
        (10.0, 24.0, 16.0, True),
        (10.0, 25.0, 5.0, True),  # however little this process used
        (0.1, 9.0, 0.1, None),
    ],
)
def test_others_are_in_the_way_if_they_leave_too_few_cores(monkeypatch, seconds, others, own, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    looks = iter([CpuSeconds(5.0, 100.0, 40.0, 4), CpuSeconds(5.0 + seconds, 100.0 + others + own, 40.0 + own, 4)])
    assert OtherProcesses(looks.__next__).are_in_the_way() is expected
