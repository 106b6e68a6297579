"""A run that is killed goes on as if nothing had happened; and never with something else than it began with."""

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
import yaml
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from hf_speculate.errors import SpeculateError
from hf_speculate_training.run import last_checkpoint, recipe_from, train_head


# Slows every step down, so that the kill lands between a checkpoint and the next one.
SLOW_TRAIN = """
import sys, time
from hf_speculate_training.methods.eagle import Eagle3Method
from hf_speculate_training.run import read_recipe
from hf_speculate_training.run import train_head
import torch
torch.set_num_threads(1)
def on_step(self, step, num_steps):
    print("step", step, flush=True)
    time.sleep(0.3 if step >= 4 else 0)
Eagle3Method.on_step = on_step
train_head(read_recipe(sys.argv[1]))
"""


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


def copied(folder: Path, tmp_path: Path, until: int) -> Path:
    """The folder as it was when the run had written checkpoint `until` and died."""
    place = tmp_path / "out"
    shutil.copytree(folder, place)
    for checkpoint in place.glob("checkpoint-*"):
        if int(checkpoint.name.rpartition("-")[2]) > until:
            shutil.rmtree(checkpoint)
    provenance = json.loads((place / "provenance.json").read_text())
    (place / "provenance.json").write_text(json.dumps(provenance | {"status": "running"}))
    return place


def test_killed_and_resumed_equals_uninterrupted(long_recipe, uninterrupted, tmp_path):
    """kill -9 in the middle of step 5 or 6, of a process; same losses, gradients and weights, bit for bit."""
    folder = tmp_path / "killed"
    values = long_recipe(folder)
    config = tmp_path / "recipe.yaml"
    config.write_text(yaml.safe_dump(values))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_TRAIN, str(config)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    reached = [line for line in iter(process.stdout.readline, "step 5\n") if line.startswith("step")]
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(reached) == 5
    assert not (folder / "config.json").exists()
    checkpoint = last_checkpoint(folder)
    assert checkpoint is not None
    assert checkpoint.endswith("checkpoint-4")
    train_head(recipe_from(values), resume=True)
    assert losses(folder) == losses(uninterrupted)
    resumed, whole = load_file(folder / "model.safetensors"), load_file(uninterrupted / "model.safetensors")
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
    sessions = json.loads((folder / "provenance.json").read_text())["sessions"]
    assert [session["from_step"] for session in sessions] == [0, 4]


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
    assert losses(folder) == losses(uninterrupted)


def test_nothing_to_resume(long_recipe, tmp_path):
    with pytest.raises(SpeculateError, match="nothing to resume"):
        train_head(recipe_from(long_recipe(tmp_path / "fresh")), resume=True)
    assert not (tmp_path / "fresh").exists()


def test_without_resume_a_run_is_not_overwritten(long_recipe, uninterrupted, tmp_path):
    folder = copied(uninterrupted, tmp_path, until=4)
    with pytest.raises(SpeculateError, match=r"--resume, from checkpoint-4"):
        train_head(recipe_from(long_recipe(folder)))


class TestOtherInputs:
    """What a run is resumed with must be what it began with; nothing is touched otherwise."""

    @pytest.fixture
    def folder(self, uninterrupted, tmp_path):
        return copied(uninterrupted, tmp_path, until=4)

    def refused(self, values, folder, message):
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        with pytest.raises(SpeculateError, match=message):
            train_head(recipe_from(values), resume=True)
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before

    def test_another_target(self, long_recipe, folder, saved_target, tmp_path):
        other = tmp_path / "other"
        shutil.copytree(saved_target, other)
        model = LlamaForCausalLM.from_pretrained(saved_target)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1.001)
        model.save_pretrained(other)
        values = long_recipe(folder)
        values["target"]["path"] = str(other)
        self.refused(values, folder, "the target is not the one that the run was started with.*fingerprint")

    def test_other_data(self, long_recipe, folder, own_texts, tmp_path):
        lines = Path(own_texts).read_text().splitlines()
        (tmp_path / "fewer.jsonl").write_text("\n".join(lines[:-1]))
        values = long_recipe(folder)
        values["data"]["train"] = str(tmp_path / "fewer.jsonl")
        self.refused(values, folder, "the data is not the one that the run was started with")

    def test_another_head(self, long_recipe, folder):
        values = long_recipe(folder)
        values["method"]["head"] = {"intermediate_size": 64}
        self.refused(values, folder, "the head is not the one that the run was started with|holds another head")

    def test_a_cache_of_another_target(self, long_recipe, make_recipe_values, saved_target, tmp_path):
        values = make_recipe_values(tmp_path / "first")
        values["features"] = {"source": "cache", "folder": str(tmp_path / "features")}
        values["training"]["max_steps"] = 1
        values["data"].pop("eval")
        train_head(recipe_from(values))
        values["output"]["folder"] = str(tmp_path / "second")
        values["data"]["max_length"] = 40
        with pytest.raises(SpeculateError, match="features"):
            train_head(recipe_from(values))
