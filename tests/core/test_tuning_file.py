"""Files of `hf-speculate tune`: what is trusted where, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from huggingface_hub import constants

from hf_speculate import AutoSpeculator
from hf_speculate.costs import CostSurface
from hf_speculate.errors import CheckpointError
from hf_speculate.reach import Acceptance
from hf_speculate.tuning import Experience
from hf_speculate.tuning_file import TUNING_FILE, Setting, TargetCosts, TuningFile, cache_costs, cached_costs


ROUNDS = CostSurface((100, 1000), (1, 9), ((1.0, 2.0), (2.0, 5.0)))


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A Hugging Face cache of the test's own."""
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets"


def costs_of(model, batch_size=1):
    return TargetCosts(Setting.of(model, batch_size), ROUNDS, CostSurface((100,), (1,), ((0.9,),)))


def tuning_of(model, drafter="prompt_lookup", options=None):
    acceptance = Acceptance()
    for _ in range(5):
        acceptance.record([1, 2], 4, 3)
    return TuningFile(
        drafter=drafter,
        options={"depth": 3} if options is None else options,
        costs=costs_of(model),
        drafting=CostSurface((100,), (1, 2), ((0.1, 0.2),)),
        acceptance=acceptance,
        ranks=[[0.5, 0.25]],
        predicted={"speedup": 2.0},
    )


def test_a_file_says_again_what_was_saved(tiny_model, tmp_path):
    tuning = tuning_of(tiny_model())
    path = tuning.save(tmp_path)
    assert path == tmp_path / TUNING_FILE
    again = TuningFile.read(path)
    assert again.path == str(path)
    assert replace(again, path=tuning.path, acceptance=tuning.acceptance) == tuning
    assert again.acceptance.to_json() == tuning.acceptance.to_json()
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ""] == [TUNING_FILE]  # no temporary file stays


def test_options_are_taken_where_it_was_measured(tiny_model, tmp_path):
    model = tiny_model()
    path = tuning_of(model, options={"depth": 3, "branches": 1}).save(tmp_path / "lookup.json")
    options = AutoSpeculator.from_name("prompt_lookup", model, tuning=path).drafter.options
    assert (options.depth, options.branches) == (3, 1)


def test_options_about_size_that_a_user_gives_replace_all_of_them(tiny_model, tmp_path):
    model = tiny_model()
    path = tuning_of(model, options={"depth": 3, "branches": 1}).save(tmp_path / "lookup.json")
    default = AutoSpeculator.from_name("prompt_lookup", model).drafter.options
    given = AutoSpeculator.from_name("prompt_lookup", model, tuning=path, max_nodes=7).drafter.options
    assert given == replace(default, max_nodes=7)
    other = AutoSpeculator.from_name("prompt_lookup", model, tuning=path, max_ngram=3).drafter.options
    assert (other.depth, other.branches, other.max_ngram) == (3, 1, 3)


@pytest.mark.parametrize("different", [{"dtype": torch.bfloat16}, {"architecture": "qwen2"}, {"attention": "eager"}])
def test_in_another_setting_only_acceptance_is_used(tiny_model, tmp_path, different, caplog):
    path = tuning_of(tiny_model()).save(tmp_path / "lookup.json")
    other = tiny_model(**different)
    with caplog.at_level("INFO", logger="hf_speculate"):
        speculator = AutoSpeculator.from_name("prompt_lookup", other, tuning=path, adaptive=True)
    assert "another setting" in caplog.text
    assert speculator.drafter.options == AutoSpeculator.from_name("prompt_lookup", other).drafter.options
    tuner = speculator.experience.tuner(other, 1)
    assert not tuner._costs.rounds
    assert tuner.acceptances[0].deepest == 3
    assert tuner.acceptances[0].expected_lengths(2, 3)[1] > 2


def test_where_it_was_measured_the_tuner_begins_with_costs_and_acceptance(tiny_model, tmp_path):
    model = tiny_model()
    path = tuning_of(model).save(tmp_path / "lookup.json")
    tuner = AutoSpeculator.from_name("prompt_lookup", model, tuning=path, adaptive=True).experience.tuner(model, 1)
    assert tuner._costs.plain(100) == 1.0
    assert tuner._costs.drafting_to(2, 100) == pytest.approx(0.2)
    assert tuner.choose([0], 100).max_nodes is not None  # no exploring first


def test_the_batch_size_matters_for_costs_only(tiny_model, tmp_path):
    model = tiny_model()
    path = tuning_of(model).save(tmp_path / "lookup.json")
    speculator = AutoSpeculator.from_name("prompt_lookup", model, tuning=path, adaptive=True)
    assert speculator.drafter.options.depth == 3
    assert not speculator.experience.tuner(model, 4)._costs.rounds


def test_a_head_brings_its_tuning(tiny_model, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    tuning_of(model, "draft_model", {"depth": 2, "top_k": 3, "max_nodes": 6}).save(tmp_path)
    options = AutoSpeculator.from_pretrained(tmp_path, model).drafter.options
    assert (options.depth, options.top_k, options.max_nodes) == (2, 3, 6)
    assert AutoSpeculator.from_pretrained(tmp_path, model, tuning=False).drafter.options.max_nodes != 6


def test_another_drafters_file_is_refused(tiny_model, tmp_path):
    model = tiny_model()
    path = tuning_of(model, "medusa").save(tmp_path / "medusa.json")
    with pytest.raises(CheckpointError, match="'medusa', this one is 'prompt_lookup'"):
        AutoSpeculator.from_name("prompt_lookup", model, tuning=path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format is 'other'"),
        ({"version": 99}, "version is 99"),
        ({"options": []}, "options must be an object"),
        ({"costs": {}}, "KeyError"),
        ({"acceptance": None}, "TypeError"),
        ({"drafting": {"contexts": [1], "sizes": [1], "seconds": [["x"]]}}, "ValueError"),
    ],
)
def test_a_broken_file_is_refused_and_says_what_to_do(tiny_model, tmp_path, change, message):
    path = tuning_of(tiny_model()).save(tmp_path / "t.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message) as caught:
        AutoSpeculator.from_name("prompt_lookup", tiny_model(), tuning=path)
    assert str(path) in str(caught.value)
    assert "hf-speculate tune" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_what_is_no_json_object_is_refused(tiny_model, tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"t\.json"):
        AutoSpeculator.from_name("prompt_lookup", tiny_model(), tuning=tmp_path / "t.json")
    with pytest.raises(CheckpointError, match=r"none\.json"):
        AutoSpeculator.from_name("prompt_lookup", tiny_model(), tuning=tmp_path / "none.json")


def test_cached_costs_serve_every_speculator_in_that_setting_and_no_other(tiny_model):
    model = tiny_model()
    cache_costs(costs_of(model))
    assert cached_costs(Setting.of(model, 1)) == costs_of(model)
    assert Experience().tuner(model, 1)._costs.plain(100) == 1.0
    assert cached_costs(Setting.of(model, 2)) is None
    assert not Experience().tuner(model, 2)._costs.rounds
    assert cached_costs(Setting.of(tiny_model(dtype=torch.bfloat16), 1)) is None


def test_a_broken_cache_file_is_left_aside(tiny_model, caplog):
    model = tiny_model()
    path = cache_costs(costs_of(model))
    path.write_text("{")
    assert cached_costs(Setting.of(model, 1)) is None
    assert str(path) in caplog.text


def test_settings_tell_what_differs(tiny_model):
    here = Setting.of(tiny_model(), 1)
    there = replace(here, device="Abacus", threads=99, batch_size=7, target={**here.target, "hidden_size": 64})
    words = here.differences(there)
    assert len(words) == 3
    assert any("Abacus" in word for word in words)
    assert any("hidden_size" in word and "32" in word and "64" in word for word in words)
    assert here.key != there.key == replace(there).key


@pytest.mark.parametrize("options", [{"depth": "4"}, {"depth": 10**9}, {"depth": True}, {"width": [0]}, {"x": 1}])
def test_options_that_tune_does_not_write_are_refused(options, tmp_path, tiny_model):
    target = tiny_model()
    surface = CostSurface((16,), (1, 4), ((0.01, 0.02),))
    costs = TargetCosts(Setting.of(target, 1), surface, surface)
    tuning = TuningFile(drafter="eagle", options=options, costs=costs, drafting=surface, acceptance=Acceptance())
    read = TuningFile.read(tuning.save(tmp_path / "tuning.json"))
    with pytest.raises(CheckpointError, match=rf"option '{next(iter(options))}' is .*; possible: depth, width"):
        read.options_for(target, {}, ("depth", "width"))
