"""Two ends of a run before its last step: a loss that is not a number, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_speculate.errors import SpeculateError
from hf_speculate.messages import get_logger

from .folder import last_checkpoint


logger = get_logger(__name__)


class DivergedError(SpeculateError, RuntimeError):
    """The loss or a gradient is not a number any more; the checkpoints hold the last good weights."""


class InterruptedTrainingError(SpeculateError, RuntimeError):
    """Ctrl-C ended a run, which `checkpoint` holds."""

    exit_code = 130

    def __init__(self, checkpoint: Path, resume_command: str):
        super().__init__(f"training was interrupted; {checkpoint} holds it. Resume: {resume_command}")
        self.checkpoint = checkpoint


class DivergenceGuard(TrainerCallback):
    """Stops a run before the optimizer takes a gradient that is not a number."""

    def on_pre_optimizer_step(self, args, state, control: TrainerControl, **kwargs) -> None:
        optimizer = kwargs["optimizer"]
        if getattr(optimizer, "scaler", None) is not None:
            return  # fp16's scaler finds its scale by such steps, and skips them itself
        gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            raise DivergedError(diverged("the gradient", float(norm), args, state))


def diverged(what: str, value: float, args: TrainingArguments, state: TrainerState) -> str:
    """The message of a `DivergedError`."""
    kept = last_checkpoint(args.output_dir)
    return (
        f"{what} became {value} at step {state.global_step + 1}; the weights were not changed by it. "
        + (f"The last good checkpoint is {kept}. " if kept else "No checkpoint had been written. ")
        + f"Possible: a lower learning rate (it was {args.learning_rate}), more warm-up, a smaller max_grad_norm, "
        "float32 instead of 16 bit; or a record that is broken."
    )


class Interruption(TrainerCallback):
    """Ends a run on Ctrl-C after its present step, with a checkpoint. A second Ctrl-C ends it at once.

    With several processes Ctrl-C stays Python's own: they could not agree on a step.
    """

    def __init__(self) -> None:
        self._asked = False

    @contextmanager
    def listening(self, num_processes: int) -> Iterator[None]:
        """Catches Ctrl-C while it is open. Only the main thread gets signals."""
        if num_processes > 1 or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._asked = False
        before = signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def on_step_end(self, args, state, control: TrainerControl, **kwargs) -> None:
        if self._asked:
            control.should_save = True

    def on_save(self, args, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        # The loop's own end may delete the checkpoint if few are kept.
        if self._asked:
            checkpoint = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            raise InterruptedTrainingError(checkpoint, "trainer.train(resume_from_checkpoint=True)")

    def _ask(self, number: int, frame: Any) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        logger.warning("Ctrl-C: a checkpoint is written after this step. Again: ends at once.")
