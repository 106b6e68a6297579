"""Ctrl-C, a second process, a finished run: nothing is lost, nothing is done twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from hf_speculate.errors import SpeculateError
from hf_speculate_training.methods.eagle import Eagle3Method
from hf_speculate_training.run import InterruptedTrainingError, read_recipe, recipe_from, train_head
from hf_speculate_training.run.folder import locked


@pytest.fixture(scope="module")
def finished(make_recipe_values, tmp_path_factory):
    """The plain values of a recipe that was run, its folder in them."""
    values = make_recipe_values(tmp_path_factory.mktemp("finished") / "out")
    train_head(recipe_from(values))
    return values


@pytest.fixture
def press_ctrl_c(monkeypatch):
    """Factory: Ctrl-C while the step of that number is computed."""

    def press(at: int, times: int = 1) -> None:
        def on_step(self, step, num_steps):
            if step == at:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(Eagle3Method, "on_step", on_step)

    return press


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_ctrl_c_writes_a_checkpoint_and_says_how_to_go_on(recipe_values, finished, press_ctrl_c, monkeypatch):
    press_ctrl_c(at=2)
    folder = Path(recipe_values["output"]["folder"])
    recipe_values["training"]["save_total_limit"] = 1
    with pytest.raises(InterruptedTrainingError) as caught:
        train_head(recipe_from(recipe_values))
    assert caught.value.checkpoint == folder / "checkpoint-3"
    recipe_file = folder / "recipe.local.yaml"
    assert f"Go on: hf-speculate train --config {recipe_file} --resume" in str(caught.value)
    assert not list(folder.glob(".train*"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    train_head(read_recipe(recipe_file), resume=True)
    whole, resumed = (load_file(Path(f) / "model.safetensors") for f in (finished["output"]["folder"], folder))
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


def test_a_second_ctrl_c_ends_at_once(recipe_values, press_ctrl_c):
    press_ctrl_c(at=1, times=2)
    with pytest.raises(KeyboardInterrupt):
        train_head(recipe_from(recipe_values))
    assert not list(Path(recipe_values["output"]["folder"]).glob("checkpoint-*"))


def test_a_finished_run_is_left_alone(finished, caplog):
    folder = Path(finished["output"]["folder"])
    before = contents(folder)
    assert train_head(recipe_from(finished), resume=True) == folder
    assert "is finished, its head is there: nothing was changed" in caplog.text
    assert contents(folder) == before


def test_a_run_that_was_killed_before_its_head_was_written_only_writes_it(finished, tmp_path):
    """Its last checkpoint is of the last step: transformers' loop would train one more."""
    folder = tmp_path / "out"
    shutil.copytree(finished["output"]["folder"], folder)
    head = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    found = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps(found | {"status": "running"}))
    train_head(recipe_from({**finished, "output": {"folder": str(folder)}}), resume=True)
    assert (folder / "model.safetensors").read_bytes() == head
    assert json.loads((folder / "provenance.json").read_text())["training"]["steps"] == 4
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}


def test_a_finished_run_can_be_given_more_steps(finished, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(finished["output"]["folder"], folder)
    longer = {**finished, "output": {"folder": str(folder)}, "training": finished["training"] | {"max_steps": 6}}
    train_head(recipe_from(longer), resume=True)
    assert json.loads((folder / "provenance.json").read_text())["training"]["steps"] == 6


HOLDER = """
import sys, time
from hf_speculate_training.run.folder import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


class TestLock:
    def test_a_second_process_is_refused_before_anything_is_loaded(self, recipe_values):
        folder = Path(recipe_values["output"]["folder"])
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            recipe_values["target"]["path"] = "./never-looked-for"
            for resume in (False, True):
                with pytest.raises(SpeculateError, match=rf"process {process.pid} on .* is training in .*{folder}"):
                    train_head(recipe_from(recipe_values), resume=resume)
        finally:
            process.kill()
            process.wait()
        with locked(folder):  # a lock ends with its process
            assert f"process {os.getpid()}" in (folder / ".train.holder").read_text()

    def test_a_folder_in_which_nothing_was_written_goes_again(self, tmp_path):
        with locked(tmp_path / "new"):
            with pytest.raises(SpeculateError, match="is training in"), locked(tmp_path / "new"):
                pass
            assert (tmp_path / "new").is_dir()
        assert not (tmp_path / "new").exists()

    def test_what_a_killed_run_left_is_no_content(self, recipe_values):
        folder = Path(recipe_values["output"]["folder"])
        folder.mkdir()
        FileLock(folder / ".train.lock").acquire().lock.release()
        (folder / ".train.holder").write_text("process 1 on moon")
        recipe_values["training"]["max_steps"] = 1
        assert (train_head(recipe_from(recipe_values)) / "model.safetensors").exists()
