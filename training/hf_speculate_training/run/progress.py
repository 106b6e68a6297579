"""Progress of a run on a terminal: a bar, a short line for each log entry, and messages that leave the bar whole."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import ProgressCallback

from .evaluation import ACCEPTANCE


# Key of a log entry -> its words in a line.
_SHOWN = {
    "loss": "loss {:.3f}",
    "accuracy_0": "accuracy {:.2f}",
    "learning_rate": "lr {:.1e}",
    "eval_loss": "evaluation loss {:.3f}",
    "eval_accuracy_0": "accuracy {:.2f}",
    f"eval_{ACCEPTANCE}": "{:.2f} tokens per drafted round",
    "train_runtime": "{:.0f} s",
    "train_loss": "mean loss {:.3f}",
}


class TrainingProgress(ProgressCallback):
    """transformers' progress bar with short lines. The entries as a whole are in `trainer.state.log_history`."""

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs:
            self.training_bar.write(log_line(logs, state.global_step, state.max_steps))

    def close(self) -> None:
        """Ends the bars of a run that an error or Ctrl-C ended: what is written next begins on a line of its own."""
        for bar in (self.prediction_bar, self.training_bar):
            if bar is not None:
                bar.close()
        self.prediction_bar = self.training_bar = None


def log_line(logs: Mapping[str, Any], step: int, num_steps: int) -> str:
    """A log entry in a line: "step 40/400: loss 3.210, accuracy 0.31, lr 1.0e-04"."""
    words = [form.format(logs[name]) for name, form in _SHOWN.items() if isinstance(logs.get(name), int | float)]
    return f"step {step}/{num_steps}: {', '.join(words)}"


def messages_above_bars() -> AbstractContextManager[None]:
    """Writes transformers' log messages above progress bars while it is open; ours always are."""
    return logging_redirect_tqdm([logging.getLogger("transformers")])
