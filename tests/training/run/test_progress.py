"""Progress of a run on a terminal: short lines, whole bars, no false warning, and what is left in the folder."""

from __future__ import annotations

import signal
import sys

import pytest
from transformers import TrainerControl, TrainerState

from hf_speculate_training.run import recipe_from, train_head
from hf_speculate_training.run.folder import checkpoints_note
from hf_speculate_training.run.guards import InterruptedTrainingError
from hf_speculate_training.run.progress import TrainingProgress, log_line
from hf_speculate_training.run.trainer import HeadTrainer


ENTRY = {"loss": 3.2104, "grad_norm": 1.5, "learning_rate": 1e-4, "epoch": 0.5, "num_input_tokens_seen": 4096}
ENTRY |= {f"{name}_{step}": 0.25 for name in ("accuracy", "kl", "share") for step in range(7)}


def test_a_log_entry_is_a_short_line():
    assert log_line(ENTRY, 40, 400) == "step 40/400: loss 3.210, accuracy 0.25, lr 1.0e-04"
    evaluated = {"eval_loss": 2.5, "eval_accuracy_0": 0.3, "eval_mean_acceptance_length": 2.314, "eval_runtime": 7.0}
    assert (
        log_line(evaluated, 40, 400)
        == "step 40/400: evaluation loss 2.500, accuracy 0.30, 2.31 tokens per drafted round"
    )


def test_lines_and_bars_end_where_the_run_ends(capsys):
    progress, state, control = TrainingProgress(), TrainerState(max_steps=4, global_step=2), TrainerControl()
    state.is_world_process_zero = True
    progress.on_train_begin(None, state, control)
    progress.on_log(None, state, control, logs=ENTRY)
    progress.close()
    progress.close()
    shown = capsys.readouterr()
    assert shown.out.strip() == "step 2/4: loss 3.210, accuracy 0.25, lr 1.0e-04"
    assert shown.err.endswith("\n")


def test_a_run_has_this_bar_and_ends_it_on_ctrl_c(recipe_values, monkeypatch, capsys):
    recipe_values["training"]["disable_tqdm"] = False
    training_step = HeadTrainer.training_step

    def interrupted(self, *arguments):
        signal.raise_signal(signal.SIGINT)
        return training_step(self, *arguments)

    monkeypatch.setattr(HeadTrainer, "training_step", interrupted)
    with pytest.raises(InterruptedTrainingError):
        _run_as_the_command(recipe_values)
    shown = capsys.readouterr().err
    assert "0/4" in shown
    assert "\ninterrupted\n" in shown


def _run_as_the_command(values) -> None:
    try:
        train_head(recipe_from(values))
    except InterruptedTrainingError:
        sys.stderr.write("interrupted\n")  # while the error holds the run, and with it the bar
        raise


def test_resuming_with_shares_of_steps_warns_of_nothing(recipe_values, monkeypatch, caplog):
    """transformers compares a share of all steps with the number that it stands for."""
    recipe_values["training"] |= {"eval_steps": 0.5, "save_steps": 0.5, "logging_steps": 0.25}
    interrupt = _stop_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        train_head(recipe_from(recipe_values))
    interrupt.undo()
    train_head(recipe_from(recipe_values), resume=True)
    assert "do not match" not in caplog.text


def _stop_after(monkeypatch, step: int) -> pytest.MonkeyPatch:
    training_step = HeadTrainer.training_step

    def stopped(self, *arguments):
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return training_step(self, *arguments)

    monkeypatch.setattr(HeadTrainer, "training_step", stopped)
    return monkeypatch


def test_checkpoints_that_are_left_are_named_with_their_use(tmp_path):
    assert checkpoints_note(tmp_path) == ""
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "optimizer.pt").write_bytes(bytes(3_000_000))
    note = checkpoints_note(tmp_path)
    assert note.startswith(f"{tmp_path}/checkpoint-* (3 MB) ")
    assert "--resume" in note
