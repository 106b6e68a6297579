"""A killed run goes on as if nothing had happened, and only with what it began with; Ctrl-C, second processes."""

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
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from hf_speculate.errors import SpeculateError
from hf_speculate_training.run import HeadTrainer, last_checkpoint, read_recipe, recipe_from, train_head
from hf_speculate_training.run.folder import locked
from hf_speculate_training.run.guards import InterruptedTrainingError


@pytest.fixture(scope="module")
def long_recipe(make_recipe_values, tmp_path_factory):
    """Factory of a recipe of 8 steps with noise (random numbers matter), a checkpoint every 2; one epoch is 3 steps."""

    def make(folder) -> dict:
        values = make_recipe_values(folder)
        values["method"]["options"] |= {"steps": 2, "noise": 0.1}
        values["training"] |= {"max_steps": 8, "eval_steps": 2, "save_total_limit": None}
        values["evaluation"] |= {"num_prompts": 2, "max_new_tokens": 6}
        return values

    return make


@pytest.fixture(scope="module")
def uninterrupted(long_recipe, tmp_path_factory):
    """The folder of a run that nobody killed."""
    return train_head(recipe_from(long_recipe(tmp_path_factory.mktemp("whole") / "out")))


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) by step, as the last checkpoint has them."""
    state = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())
    return {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in state["log_history"] if "loss" in entry}


def assert_same_weights(*folders) -> None:
    one, other = (load_file(Path(folder) / "model.safetensors") for folder in folders)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(other[name], tensor), name


def copied(folder: Path, tmp_path: Path, until: int) -> Path:
    """The folder as it was when the run had written checkpoint `until` and died."""
    place = tmp_path / "out"
    shutil.copytree(folder, place)
    for checkpoint in place.glob("checkpoint-*"):
        if int(checkpoint.name.rpartition("-")[2]) > until:
            shutil.rmtree(checkpoint)
    (place / "model.safetensors").unlink()
    provenance = json.loads((place / "provenance.json").read_text())
    (place / "provenance.json").write_text(json.dumps(provenance | {"status": "running"}))
    return place


def test_a_torn_checkpoint_is_passed_over(long_recipe, uninterrupted, tmp_path):
    """A kill while checkpoint 6 was being removed (a file is gone), or written: half a state file, then none."""
    folder = copied(uninterrupted, tmp_path, until=6)
    torn, before = folder / "checkpoint-6", str(folder / "checkpoint-4")
    assert last_checkpoint(folder) == str(torn)
    (torn / "optimizer.pt").unlink()
    assert last_checkpoint(folder) == before
    shutil.copy(uninterrupted / "checkpoint-6" / "optimizer.pt", torn)
    state = (torn / "trainer_state.json").read_text()
    (torn / "trainer_state.json").write_text(state[: len(state) // 2])
    assert last_checkpoint(folder) == before
    (torn / "trainer_state.json").unlink()
    assert last_checkpoint(folder) == before
    train_head(recipe_from(long_recipe(folder)), resume=True)
    assert losses(folder) == losses(uninterrupted), "losses and norms of gradients, bit for bit"
    assert_same_weights(folder, uninterrupted)
    sessions = json.loads((folder / "provenance.json").read_text())["sessions"]
    assert sessions[-1]["from_step"] == 4


def test_resume_refuses_a_folder_without_a_run(long_recipe, tmp_path):
    with pytest.raises(SpeculateError, match="nothing to resume"):
        train_head(recipe_from(long_recipe(tmp_path / "fresh")), resume=True)
    assert not (tmp_path / "fresh").exists()


def test_without_resume_a_run_is_not_overwritten(long_recipe, uninterrupted, tmp_path):
    folder = copied(uninterrupted, tmp_path, until=4)
    with pytest.raises(SpeculateError, match=r"--resume, from checkpoint-4"):
        train_head(recipe_from(long_recipe(folder)))


class TestOtherInputs:
    """A run resumes only with what it began with; nothing is touched otherwise."""

    @pytest.fixture
    def folder(self, uninterrupted, tmp_path):
        return copied(uninterrupted, tmp_path, until=4)

    def refused(self, values, folder, message):
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        with pytest.raises(SpeculateError, match=message):
            train_head(recipe_from(values), resume=True)
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before

    def test_resume_refuses_another_target(self, long_recipe, folder, saved_target, tmp_path):
        other = tmp_path / "other"
        shutil.copytree(saved_target, other)
        model = LlamaForCausalLM.from_pretrained(saved_target)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1.001)
        model.save_pretrained(other)
        values = long_recipe(folder)
        values["target"]["path"] = str(other)
        self.refused(values, folder, "the target is not the one that the run was started with.*fingerprint")

    def test_resume_refuses_other_data(self, long_recipe, folder, own_texts, tmp_path):
        lines = Path(own_texts).read_text().splitlines()
        (tmp_path / "fewer.jsonl").write_text("\n".join(lines[:-1]))
        values = long_recipe(folder)
        values["data"]["train"] = str(tmp_path / "fewer.jsonl")
        self.refused(values, folder, "the data is not the one that the run was started with")

    def test_run_refuses_a_cache_of_other_data(self, long_recipe, make_recipe_values, saved_target, tmp_path):
        values = make_recipe_values(tmp_path / "first")
        values["features"] = {"source": "cache", "folder": str(tmp_path / "features")}
        values["training"]["max_steps"] = 1
        values["data"].pop("eval")
        train_head(recipe_from(values))
        values["output"]["folder"] = str(tmp_path / "second")
        values["data"]["max_length"] = 40
        with pytest.raises(SpeculateError, match="features"):
            train_head(recipe_from(values))


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
        training_step = HeadTrainer.training_step

        def interrupted(self, *arguments):
            if self.state.global_step == at:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return training_step(self, *arguments)

        monkeypatch.setattr(HeadTrainer, "training_step", interrupted)

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
    assert f"Resume: hf-speculate train --config {recipe_file} --resume" in str(caught.value)
    assert not list(folder.glob(".train*"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    train_head(read_recipe(recipe_file), resume=True)
    assert_same_weights(finished["output"]["folder"], folder)


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
    """The last checkpoint is of the last step; transformers' loop would train one more."""
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
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / ".train.lock").touch()  # left by a killed run
        with locked(tmp_path / "new"):
            with pytest.raises(SpeculateError, match="is training in"), locked(tmp_path / "new"):
                pass
            assert (tmp_path / "new").is_dir()
        assert not (tmp_path / "new").exists()
