"""What `hf-speculate train-bench` starts in processes of their own, and what it says where one fails."""

from __future__ import annotations

import os
import sys
from concurrent.futures.process import BrokenProcessPool

import pytest

from hf_speculate.errors import SpeculateError
from hf_speculate_training.bench import TrainBenchSettings, bench_train, tables
from hf_speculate_training.bench.losses import LossShape, measure_peer_loss, run_apart


SHAPE = LossShape(num_entries=16, num_positions=8, hidden_size=8, vocab_size=128)


def test_a_process_that_dies_ends_the_measurement():
    with pytest.raises(BrokenProcessPool):
        run_apart(os._exit, 1)


def test_both_losses_are_measured_and_shown():
    result = bench_train(TrainBenchSettings(methods=(), loss=SHAPE, threads=1, device="cpu"))
    assert [(row["form"], row["kind"]) for row in result["losses"]] == [
        ("plain", "soft"),
        ("lean", "soft"),
        ("plain", "hard"),
        ("lean", "hard"),
    ]
    assert all(row["seconds"] > 0 for row in result["losses"])
    assert [table.row_count for table in tables(result)] == [0, 4]


@pytest.mark.parametrize(
    ("python", "found"), [("/nowhere/python", "cannot run /nowhere/python"), (sys.executable, "needs torch")]
)
def test_an_interpreter_without_speculators_gets_a_clear_error(python, found):
    with pytest.raises(SpeculateError, match=found):
        measure_peer_loss(python, "soft", SHAPE, num_threads=1)
