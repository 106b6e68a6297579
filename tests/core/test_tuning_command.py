"""`hf-speculate tune` on a simulated clock, where what is predicted can be compared with what is measured."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_speculate import AutoSpeculator, cli
from hf_speculate.errors import SpeculateError
from hf_speculate.testing.scripted import ScriptedDrafter
from hf_speculate.tune.running import Run, TuneSettings
from hf_speculate.tune.surveys import request, survey
from hf_speculate.tuning import NOTHING, Budget
from hf_speculate.tuning_file import Setting, TuningFile, cached_costs

from ..conftest import VOCAB_SIZE
from .test_tuning import Clock


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))


def settings(folders, speculator, **changes):
    few = {"limit": 2, "max_new_tokens": 32, "contexts": (48,), "repeats": 1}
    return TuneSettings(target=str(folders / "target"), speculator=speculator, **few | changes)


@pytest.mark.parametrize(
    ("speculator", "slope", "batch_size"),
    [("prompt_lookup", 1.0, 1), ("prompt_lookup", 0.1, 2), ("draft_model:model={}/target", 0.1, 1)],
)
def test_what_is_predicted_is_what_is_measured(monkeypatch, bench_folders, speculator, slope, batch_size):
    run = Run(settings(bench_folders, speculator.format(bench_folders), batch_size=batch_size))
    clock = Clock(monkeypatch, run.target, slope)
    outcome = run()
    clock.hook.remove()
    assert outcome.costs.plain(1, 100) == pytest.approx(1.0)
    assert outcome.costs.rounds(17, 100) == pytest.approx(1 + 16 * slope, rel=0.02)
    assert outcome.measured is not None
    assert outcome.best.speedup == pytest.approx(outcome.measured["fixed"], rel=0.05)
    assert outcome.best.speedup == max(prediction.speedup for prediction in outcome.compared)
    assert outcome.best.speedup >= outcome.given.speedup
    if speculator.startswith("draft_model"):  # the target drafts for itself: all is accepted
        assert outcome.best.candidate.options["depth"] >= 8
        assert outcome.best.tokens > 8
    if slope == 1:
        assert outcome.best.candidate.options.get("max_nodes", 1) <= 12


def test_the_command_prints_tables_and_one_line_of_json_and_writes_a_file(bench_folders, tmp_path):
    head = shutil.copytree(bench_folders / "draft", tmp_path / "head")
    arguments = ["tune", "--target", bench_folders / "target", "-s", head, "--write", head]
    arguments += ["--limit", 1, "--max-new-tokens", 16, "--context", 48, "--repeats", 1]
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    for title in ("Cost of a round", "Acceptance by depth and rank", "predicted"):
        assert title in result.stdout
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["written"] == str(head / "tuning.json")
    assert set(found["error"]) == {"fixed", "adaptive"}
    target = AutoModelForCausalLM.from_pretrained(bench_folders / "target")
    speculator = AutoSpeculator.from_pretrained(head, target, adaptive=True)
    options = speculator.drafter.options
    assert {name: getattr(options, name) for name in found["options"]} == found["options"]
    assert speculator.experience.tuner(target, 1)._costs.plain(48) > 0
    assert cached_costs(Setting.of(target, 1)) is not None
    assert TuningFile.read(head).predicted["speedup"] == pytest.approx(found["predicted"]["speedup"])


def test_without_verification_nothing_is_claimed_to_be_measured(bench_folders):
    outcome = Run(settings(bench_folders, "prompt_lookup", verify=False, max_new_tokens=16))()
    assert outcome.measured is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 3}, "at least 16"),
        ({"repeats": 0}, "repeats"),
        ({"contexts": (48, 500)}, "do not fit the target's 512"),
        ({"max_new_tokens": 511}, "no prompt leaves room"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_cannot_be_measured_is_refused(bench_folders, changes, message):
    with pytest.raises(SpeculateError, match=message):
        Run(settings(bench_folders, "prompt_lookup", **changes)).contexts  # noqa: B018


def test_a_survey_plays_its_budgets_and_tells_what_was_drafted(tiny_model, prompt):
    model, ids = tiny_model(), prompt(12)
    text = model.generate(ids, max_new_tokens=80)[:, 12:]
    drafter = ScriptedDrafter(text, (2, 2, 1), accuracy=1.0, vocab_size=VOCAB_SIZE)
    budgets = [Budget(), Budget(max_depth=2), Budget(0, 0), Budget(max_nodes=2)]
    found = survey(model, drafter, ids, budgets, NOTHING, request(80))
    assert [(r.nodes, r.depth) for r in found.rounds] == [(5, 3), (4, 2), (0, 0), (2, 3)]
    assert [r.context for r in found.rounds] == [12, 16, 19, 20]
    assert [len(r.path) for r in found.drafted] == [3, 2, 0, 1] or len(found.drafted) == 3
    assert found.drafted[0].parents[:3] == (-1, 0, 0)
    assert found.tokens < 20  # it ends with its budgets
    assert torch.equal(model.generate(ids, max_new_tokens=80)[:, 12:], text)
