"""What a process finds where it was started: other devices, FSDP's environment, its place among others."""

from __future__ import annotations

import logging

import pytest
from transformers import TrainingArguments

from hf_speculate import SpeculateError
from hf_speculate_training import read_recipe, train_head
from hf_speculate_training.run.arguments import check_launch, process_index, quiet_replicas, rows_a_step

from ...support.training import recipe_file


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


@pytest.mark.parametrize("value", ["true", "True", "1"])
def test_fsdp_of_accelerate_is_refused_before_anything_is_written(recipe_values, tmp_path, monkeypatch, value):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", value)
    with pytest.raises(SpeculateError, match="not with accelerate's --use_fsdp"):
        train_head(read_recipe(recipe_file(recipe_values, tmp_path)))
    assert not (tmp_path / "out").exists()


def test_rows_a_step(make_args):
    assert rows_a_step(make_args(per_device_train_batch_size=3, gradient_accumulation_steps=4)) == 12


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


def test_place_among_processes(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert process_index() == 0
    monkeypatch.setenv("RANK", "3")
    assert process_index() == 3
