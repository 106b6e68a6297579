"""Paths that begin with "~", where no shell has replaced it: they are in the home folder, and no folder "~" is made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

import hf_speculate
from hf_speculate import AutoSpeculator
from hf_speculate.speculator import local_folder
from hf_speculate_gguf import find_file, load_model, read_header
from hf_speculate_plugins.checkpoints import TargetFiles
from hf_speculate_plugins.suffix import SuffixStore
from hf_speculate_tools import cli
from hf_speculate_tools.check import write_calibration
from hf_speculate_tools.commands import read_prompts, report, target_path
from hf_speculate_tools.heads.convert import convert_checkpoint
from hf_speculate_training.regenerate.journal import Journal
from hf_speculate_training.run import read_recipe

from .support.heads import HIDDEN, PLAIN, target, write_head, write_medusa_heads
from .support.packed import write_model


pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The home folder; the current one is another."""
    folder, here = tmp_path / "home", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    # compiled kernels stay where they are
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(here)
    yield folder
    assert not os.listdir(here)


def drafters(speculator) -> list[str]:
    return [part.name for part in speculator.drafter.parts]


def test_home_paths_of_eagle_heads_are_expanded(home, prompt):
    model = target()
    write_head(home / "head")
    read = AutoSpeculator.from_pretrained("~/head", target=model)
    read.save_pretrained("~/saved")
    read.drafter.save_pretrained("~/again")
    for name in ("saved", "again"):
        assert (home / name / "config.json").is_file()
    plain = model.generate(prompt(9), **PLAIN)
    for text in ("~/saved", "~/head:depth=2", "~/head+suffix", "suffix+~/head"):
        assert torch.equal(model.generate(prompt(9), **PLAIN, speculator=text), plain)


def test_home_paths_of_medusa_heads_are_expanded(home):
    write_medusa_heads(home / "heads")
    read = AutoSpeculator.from_name("medusa", target=target(), heads="~/heads")
    read.drafter.save_pretrained("~/again")
    assert AutoSpeculator.from_pretrained("~/again", target=target()).drafter.name == "medusa"


def test_home_paths_of_draft_models_are_expanded(home, tiny_model):
    model = tiny_model()
    tiny_model(num_layers=1).save_pretrained(home / "draft")
    assert drafters(AutoSpeculator.from_name("draft_model", target=model, model="~/draft")) == ["draft_model"]
    assert drafters(AutoSpeculator.from_pretrained("~/draft", target=model)) == ["draft_model"]
    for text in ("draft_model:model=~/draft", "draft_model:model=~/draft+suffix", "~/draft:depth=2+suffix"):
        assert drafters(hf_speculate.attach(model, text))[0] == "draft_model"
        hf_speculate.detach(model)


def test_home_paths_of_gguf_files_are_expanded(home, monkeypatch):
    write_model(home / "model.gguf")
    packed = load_model("~/model.gguf", backend="dequantize")
    assert read_header("~/model.gguf").path == str(home / "model.gguf")
    assert find_file("~", "model.gguf", {}) == str(home / "model.gguf")
    dense = load_model("~/model.gguf", backend="dense")
    assert packed.config.name_or_path == dense.config.name_or_path == str(home / "model.gguf")
    monkeypatch.setenv("HF_SPECULATE_QWEN_CODER", "~/model.gguf")
    assert target_path("qwen2.5-coder-0.5b") == str(home / "model.gguf")


def test_home_paths_of_commands_are_expanded(home, hub):
    write_head(home / "head")
    assert local_folder("~/head") == target_path("~/head") == str(home / "head")
    convert_checkpoint("~/head", "~/converted", "specforge")
    assert (home / "converted" / "config.json").is_file()
    (home / "prompts.jsonl").write_text('{"prompt": "def"}\n')
    assert [prompt.content for prompt in read_prompts("~/prompts.jsonl")] == ["def"]
    target().save_pretrained(home / "target")
    assert TargetFiles("~/target").text_config.hidden_size == HIDDEN
    write_calibration("~/head", target(), [torch.arange(9)], max_new_tokens=8)
    assert (home / "head" / "calibration.json").is_file()
    report({"a": 1}, out=Path("~/out.json"), json_only=True)
    assert (home / "out.json").read_text() == '{"a": 1}\n'
    for command in (["card", "~/head"], ["push", "~/head", "--repo-id", "me/head"]):
        done = CliRunner().invoke(cli.app, command)
        assert done.exit_code == 0, done.output


def test_home_paths_in_recipes_are_expanded(home):
    sections = {
        "target": {"path": "~/target", "adapter": "~/adapter"},
        "data": {"train": "own.jsonl"},
        "method": {"name": "eagle3"},
        "features": {"folder": "~/features"},
        "output": {"folder": "~/run"},
    }
    (home / "recipe.yaml").write_text(yaml.safe_dump(sections))
    recipe = read_recipe("~/recipe.yaml")
    named = (recipe.target.path, recipe.target.adapter, recipe.feature_folder, recipe.output.folder)
    assert named == tuple(str(home / name) for name in ("target", "adapter", "features", "run"))
    with Journal("~/answers.jsonl", {}):
        assert (home / "answers.jsonl").is_file()


def test_home_paths_of_stores_are_expanded(home):
    SuffixStore().save("~/store.json")
    assert (home / "store.json").is_file()
    SuffixStore.load("~/store.json")
