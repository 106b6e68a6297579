"""The group of processes that train together ends with the command."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

from hf_speculate_training.__main__ import app
from hf_speculate_training.run import command
from tests.support.training import recipe_file


def names_of_threads():
    return [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]


@pytest.fixture
def group():
    """A group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not any("gloo" in name for name in names_of_threads()):
        time.sleep(0.01)  # a thread gives itself its name after it has started
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the names of threads from /proc")
@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_the_command_leaves_no_thread_of_the_group(group, recipe_values, monkeypatch, tmp_path, options):
    def train(*_, **__):
        """Exchanges gradients, and leaves the model to the garbage collector, as a trainer does."""
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        model.itself = [model]
        return tmp_path

    monkeypatch.setattr(command, "train_head", train)
    monkeypatch.setattr(command, "prepare", train)
    monkeypatch.setattr(command, "describe_run", str)
    config = recipe_file(recipe_values, tmp_path)
    assert any("gloo" in name for name in names_of_threads())
    result = CliRunner().invoke(app, ["train", "--config", str(config), *options])
    assert result.exit_code == 0, result.output
    assert not distributed.is_initialized()
    assert not [name for name in names_of_threads() if "gloo" in name]
