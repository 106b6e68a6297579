"""Failures are found before the first step, and before anything is written; processes know their place."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from transformers.integrations import integration_utils

from hf_speculate.errors import SpeculateError, UploadError
from hf_speculate_training.methods.eagle import Eagle3Method
from hf_speculate_training.run import HeadTrainer, builder, preflight, prepare, recipe, recipe_from, train_head
from hf_speculate_training.run.arguments import check_launch, quiet_replicas


class FrozenMethod(Eagle3Method):
    """A method whose head is not trained."""

    name = "frozen"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.requires_grad_(False)


@pytest.fixture
def refused(recipe_values):
    """Asserts that a recipe with these changes is refused with this message, and that its folder was not made."""

    def check(message: str, **sections) -> None:
        for section, values in sections.items():
            recipe_values.setdefault(section, {}).update(values)
        with pytest.raises(SpeculateError, match=message):
            prepare(recipe_from(recipe_values))
        assert not Path(recipe_values["output"]["folder"]).exists()

    return check


CASES = {
    "layout": (
        r"output\.layout=sglang: ",
        {"method": {"name": "medusa", "options": {}}, "output": {"layout": "sglang"}},
    ),
    "tracker": ("report_to=.*tensorbord.* cannot be used: .*tensorboard", {"training": {"report_to": ["tensorbord"]}}),
    "data that are not there": (
        "'absent.jsonl': no such file",
        {"target": {"path": "./never-loaded"}, "data": {"train": "absent.jsonl"}},
    ),
    "options that the drafter does not have": (
        r"evaluation\.options cannot be used: .*dept",
        {"evaluation": {"options": {"dept": 3}}},
    ),
    "prompts that fill the context": ("leaves room for 252 new tokens", {"evaluation": {"max_new_tokens": 252}}),
    "a target that is not there": (r"cannot load the target '\./nowhere'", {"target": {"path": "./nowhere"}}),
    "a revision of a folder": (
        r"a revision \('main'\) needs a target on the Hub; .* is on this machine",
        {"target": {"revision": "main"}},
    ),
    "a head that brings nothing to train": ("has no parameter to train", {"method": {"name": "frozen", "options": {}}}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_cannot_work_is_refused_before_the_first_step(refused, monkeypatch, case):
    load = builder.load_method
    monkeypatch.setattr(recipe, "check_method", lambda name: None)
    monkeypatch.setattr(builder, "load_method", lambda name: FrozenMethod if name == "frozen" else load(name))
    message, sections = CASES[case]
    refused(message, **sections)


def test_train_refuses_a_missing_tracker(refused, monkeypatch):
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: False)
    refused("report_to=.* cannot be used: .*pip install wandb", training={"report_to": "wandb"})


def test_train_refuses_evaluation_data_without_prompts(refused, write_lines):
    data = write_lines([{"input_ids": [5, 6], "loss_mask": [True, True]}], "eval.jsonl")
    refused("no evaluation prompt can be made", data={"eval": str(data)}, evaluation={"prompt_tokens": 0})


def test_train_refuses_prompts_without_evaluation_data(refused, write_lines):
    prompts = write_lines([{"prompt": "a b c"}], "prompts.jsonl")
    refused("evaluation.prompts are given, but no", data={"eval": None}, evaluation={"prompts": str(prompts)})


class TestHub:
    def test_train_refuses_a_repository_without_permission(self, refused, hub):
        hub.user["auth"]["accessToken"]["role"] = "read"
        refused("may not write to me/head", target={"path": "./never-loaded"}, output={"push_to_hub": "me/head"})

    def test_a_push_that_fails_keeps_the_head_and_says_how_to_go_on(self, recipe_values, hub):
        hub.problem = RuntimeError("the cable was cut")
        recipe_values["output"]["push_to_hub"] = "me/head"
        recipe_values["training"]["max_steps"] = 1
        folder = Path(recipe_values["output"]["folder"])
        with pytest.raises(UploadError, match=f"hf-speculate push {folder} --repo-id me/head"):
            train_head(recipe_from(recipe_values))
        assert json.loads((folder / "provenance.json").read_text())["status"] == "complete"
        assert (folder / "model.safetensors").exists()
        assert not list(folder.glob(".train*"))


class TestDisk:
    @pytest.fixture
    def free(self, monkeypatch):
        def have(num_bytes: int) -> None:
            monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))

        return have

    def test_train_refuses_a_disk_too_small_for_checkpoints(self, refused, free):
        free(100_000)
        refused(r"disk is too small: checkpoints and head in .* GiB \(computed\), and 0\.00 GiB are free")

    def test_train_adds_the_cache_to_the_needed_disk(self, recipe_values, free, tmp_path):
        """Each of them fits; and what a cache holds already is not needed again."""
        recipe_values["features"] = {"source": "cache", "folder": str(tmp_path / "features")}
        given = recipe_from(recipe_values)
        run = prepare(given)
        output = preflight._output_bytes(run.args, run.target, run.method)
        size = 12 * 48 * (3 * 32 * 4 + 25)  # 12 rows of 48 tokens; two features and the last state, float32
        free(output + size)
        prepare(given)
        free(output + size - 1)
        with pytest.raises(SpeculateError, match=r"checkpoints and head .*, feature cache in .*features"):
            prepare(given)
        (tmp_path / "features").mkdir()
        (tmp_path / "features" / "held").write_bytes(b"x" * 1000)
        prepare(given)


def test_a_failing_evaluation_does_not_take_the_head_along(recipe_values, monkeypatch, saved_target):
    def evaluate(self, *args, **kwargs):
        raise MemoryError("evaluated to death")

    recipe_values["training"] |= {"eval_strategy": "no", "max_steps": 1}
    monkeypatch.setattr(HeadTrainer, "evaluate", evaluate)
    folder = Path(recipe_values["output"]["folder"])
    with pytest.raises(MemoryError):
        train_head(recipe_from(recipe_values))
    assert {"model.safetensors", "config.json", "README.md", "provenance.json"} <= {p.name for p in folder.iterdir()}


def test_the_cards_snippet_runs_as_it_is_written(recipe_values, saved_target, tmp_path, monkeypatch, capsys):
    shutil.copytree(saved_target, tmp_path / "target")
    recipe_values["target"] = {"path": str(tmp_path / "target")}
    recipe_values["training"]["max_steps"] = 2
    recipe_values["evaluation"]["num_prompts"] = 0
    folder = train_head(recipe_from(recipe_values))
    snippet = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    capsys.readouterr()
    exec(compile(snippet, "card", "exec"), names)
    assert names["speculator"].stats.rounds > 0
    model, tokenizer = (kind.from_pretrained("target") for kind in (AutoModelForCausalLM, AutoTokenizer))
    plain = model.generate(**names["inputs"], max_new_tokens=128)
    assert capsys.readouterr().out == tokenizer.decode(plain[0], skip_special_tokens=True) + "\n"


@pytest.fixture
def make_args(tmp_path):
    """Factory of training arguments."""
    return lambda **given: TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, **given)


def test_a_process_takes_one_device(make_args, caplog):
    args = make_args(per_device_train_batch_size=4)
    assert args.n_gpu <= 1  # and the devices were counted
    args._n_gpu = 3
    assert args.train_batch_size == 12
    check_launch(args)
    assert args.train_batch_size == 4
    assert "3 devices are there, this process uses the first" in caplog.text


def test_fsdp_of_accelerate_is_refused_before_anything_is_written(recipe_values, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(SpeculateError, match="not with accelerate's --use_fsdp"):
        train_head(recipe_from(recipe_values))
    assert not (tmp_path / "out").exists()


def test_replicas_are_quiet(make_args, monkeypatch, caplog):
    names = ("hf_speculate", "hf_speculate_plugins", "hf_speculate_training")
    before = {name: logging.getLogger(name).level for name in names}
    silenced = []
    monkeypatch.setattr("hf_speculate_training.run.arguments.logging.set_verbosity", lambda level: None)
    monkeypatch.setattr(
        "hf_speculate_training.run.arguments.logging.disable_progress_bar", lambda: silenced.append("ours")
    )
    monkeypatch.setattr(
        "hf_speculate_training.run.arguments.datasets.disable_progress_bars", lambda: silenced.append("data")
    )
    try:
        quiet_replicas(make_args())
        assert not silenced
        monkeypatch.setattr(TrainingArguments, "should_log", False)
        quiet_replicas(make_args(log_level_replica="error"))
        assert silenced == ["ours", "data"]
        logging.getLogger("hf_speculate_training.run.run").warning("said by another process")
        assert not caplog.records
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
