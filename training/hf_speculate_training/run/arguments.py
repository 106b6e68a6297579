"""Arguments of the trainer: the defaults of head training, those of a recipe, and the way the process was started."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, get_args, get_type_hints

import datasets
import torch
from torch import distributed
from transformers import TrainingArguments
from transformers.utils import logging
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from hf_speculate.errors import SpeculateError
from hf_speculate.messages import get_logger

from ..sections import RecipeError, field_names, refuse_unknown, validated
from .evaluation import ACCEPTANCE
from .recipe import Recipe


logger = get_logger(__name__)

# Types of arguments that pydantic checks; transformers checks the rest.
_PLAIN = {bool, int, float, str, type(None)}
# Arguments that other sections of a recipe set.
_ELSEWHERE = {
    "output_dir": "output.folder",
    "push_to_hub": "output.push_to_hub",
    "hub_model_id": "output.push_to_hub",
    "hub_private_repo": "output.private",
    "resume_from_checkpoint": "the option --resume",
    "remove_unused_columns": "nothing: it must stay as it is",
}


@dataclass
class HeadTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the defaults of head training (EAGLE's optimizer, SpecForge's rate and clipping).

    Attributes:
        muon: True takes Muon for the layers' matrices at `learning_rate`, and AdamW for the rest, see `MuonWithAdamW`.
        adamw_learning_rate: learning rate of that AdamW; None for half of `learning_rate`.
    """

    muon: bool = False
    adamw_learning_rate: float | None = None
    learning_rate: float = 1e-4
    adam_beta2: float = 0.95
    lr_scheduler_type: Any = "cosine"
    warmup_steps: float = 0.04  # below 1 it is a share of all steps
    max_grad_norm: float = 0.5
    num_train_epochs: float = 10.0
    logging_steps: float = 10
    save_total_limit: int | None = 2
    logging_nan_inf_filter: bool = False  # a loss that is not a number stops the run
    include_num_input_tokens_seen: Any = "all"
    remove_unused_columns: bool = False  # a batch does not hold a model's arguments
    label_names: list[str] | None = field(default_factory=lambda: ["loss_mask"])
    ddp_find_unused_parameters: bool | None = False  # every parameter gets a gradient
    log_level_replica: str = "error"  # one process logs for all


def training_arguments(recipe: Recipe) -> HeadTrainingArguments:
    """The arguments of a recipe's `training` section.

    A run with evaluation data evaluates and saves every 500 steps by default, and keeps the checkpoint with the best
    mean acceptance length. Raises `RecipeError` for a key that is not known, or that belongs to another section.
    """
    given = {"use_cpu": not torch.accelerator.is_available(), **recipe.training}
    for name, place in _ELSEWHERE.items():
        if name in given:
            raise RecipeError(f"training.{name} is not set in this section but by {place}.")
    refuse_unknown(given, field_names(HeadTrainingArguments), "training")
    given |= _typed(given)
    if recipe.evaluates:
        every, strategy = given.get("eval_steps", 500), given.get("eval_strategy", "steps")
        defaults = {
            "eval_strategy": "steps",
            "eval_steps": every,
            "save_strategy": strategy,
            "save_steps": every,
            "metric_for_best_model": f"eval_{ACCEPTANCE}" if recipe.evaluation.num_prompts else "eval_loss",
            "load_best_model_at_end": strategy != "no",
        }
        given = {**defaults, **given}
    try:
        return HeadTrainingArguments(output_dir=recipe.output.folder, **given)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"the section training cannot be used: {error}") from error


def _typed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, flags and texts among training arguments, checked: `TrainingArguments` takes any type for them."""
    hints = get_type_hints(HeadTrainingArguments)
    plain = {name: hints[name] for name in given if set(get_args(hints[name]) or (hints[name],)) <= _PLAIN}
    kind: Any = TypedDict("Training", plain)  # type: ignore[misc]
    return validated(kind, {name: given[name] for name in plain}, "the section training")


def check_launch(args: TrainingArguments) -> None:
    """Leaves one device to a process: `torch.nn.DataParallel`, which `Trainer` would use, knows nothing of the target.

    Raises:
        SpeculateError: FSDP of `Trainer` or accelerate is on. It would shard the head, and all processes but the first
            would load the target without its weights.
    """
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes"):
        where = "training.fsdp" if args.fsdp else "accelerate's --use_fsdp"
        raise SpeculateError(
            f"heads are trained with a copy in every process, not with {where}. Possible: leave that out, and for a "
            "target that is too large for one device set target.shard=true, which shards its layers."
        )
    if args.n_gpu > 1:
        logger.warning(
            f"{args.n_gpu} devices are there, this process uses the first. All of them: accelerate launch -m "
            "hf_speculate_training train ..."
        )
        args._n_gpu = 1


def quiet_replicas(args: TrainingArguments) -> None:
    """Lets one process speak: all others log only errors, and show no progress bars."""
    logging.set_verbosity(args.get_process_log_level())
    if not args.should_log:
        for package in ("hf_speculate", "hf_speculate_plugins", "hf_speculate_training"):
            getLogger(package).setLevel(args.get_process_log_level())
        logging.disable_progress_bar()
        datasets.disable_progress_bars()


def rows_a_step(args: TrainingArguments) -> int:
    """Rows of one optimizer step, over all processes."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def process_index() -> int:
    """Index of this process among those that train together; 0 if it is the only one."""
    return int(os.environ.get("RANK", "0"))


def end_process_group() -> None:
    """Ends the group of processes that trained together, if there is one.

    Threads of the group may hold tensors for a moment after the last exchange. A thread that frees a tensor while the
    interpreter ends aborts its process, and the launcher reports a finished run as failed.
    """
    if distributed.is_available() and distributed.is_initialized():
        gc.collect()  # the trainer holds the group, and a group that is held keeps its threads
        distributed.destroy_process_group()
