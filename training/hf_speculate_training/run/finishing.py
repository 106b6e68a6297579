"""What is left when the last step is done: head, card, curves, figures, upload; and what to type where it was not."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hf_speculate.drafting import CalibrationTable, SavedHead
from hf_speculate.errors import SpeculateError, UploadError
from hf_speculate.hub import CURVES_FILE, card_facts, push_folder, write_card
from hf_speculate.messages import get_logger
from hf_speculate.models import unwrap
from hf_speculate.speculator import AutoSpeculator
from hf_speculate_plugins.check import measure_calibration

from ..methods import TrainingMethod
from .checkpoints import step_of
from .output_folder import recipe_file
from .plots import plot_run
from .recipe import Recipe
from .trainer import HeadTrainer


logger = get_logger(__name__)


def write_head(recipe: Recipe, method: TrainingMethod, target: nn.Module) -> SavedHead:
    """Writes the head in the recipe's layout with its card, and loads it once to see that it can be."""
    output = recipe.output
    saved = method.save(output.folder, unwrap(target), output.layout)
    write_card(output.folder, **card_facts(output.folder, saved), repo_id=output.push_to_hub)
    AutoSpeculator.from_pretrained(output.folder, target=target)
    return saved


def calibration_of(method: TrainingMethod, target: nn.Module, prompts: Sequence[Tensor]) -> CalibrationTable | None:
    """What the head's values mean on held-out prompts, where there are any."""
    model = unwrap(target)
    return measure_calibration(model, method.drafter(model), prompts) if prompts else None


def resume_command(folder: str | os.PathLike) -> str:
    """What goes on with the run in `folder`, to be typed where it was started."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    program = "hf-speculate" if processes == 1 else "accelerate launch -m hf_speculate_training"
    return f"{program} train --config {shlex.quote(str(recipe_file(folder)))} --resume"


def push_head(recipe: Recipe) -> None:
    """Uploads the finished head; raises `UploadError` that says how to try again."""
    output = recipe.output
    message = f"Upload {recipe.method.name} head"
    try:
        push_folder(output.folder, output.push_to_hub, private=output.private, commit_message=message)
    except SpeculateError as error:
        raise UploadError(
            f"the head is complete in {output.folder}, but it was not uploaded: {error} Try again: "
            f"hf-speculate push {shlex.quote(output.folder)} --repo-id {output.push_to_hub}"
        ) from error


def outcome_of(trainer: HeadTrainer, sessions: list[dict[str, Any]]) -> dict[str, Any]:
    """What training came to, for provenance."""
    state = trainer.state
    best = state.best_model_checkpoint
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    return {
        "steps": state.global_step,
        "epochs": state.epoch,
        "tokens": state.num_input_tokens_seen,
        "last_loss": losses[-1] if losses else None,
        "seconds": sum(session.get("seconds", 0.0) for session in sessions),
        "processes": trainer.args.world_size,
        "best_step": step_of(best) if best else None,
        "best_metric": {trainer.args.metric_for_best_model: state.best_metric} if best else None,
    }


def draw_curves(history: list[Any], folder: Path, title: str) -> None:
    """The curves; a run is not lost for a picture."""
    try:
        plot_run(history, folder / CURVES_FILE, title=title)
    except SpeculateError as error:
        logger.warning(f"no curves were drawn: {error}")
