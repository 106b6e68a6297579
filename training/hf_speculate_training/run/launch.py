"""How a run was started: in one process, or in several that train together."""

from __future__ import annotations

import os
from logging import getLogger

import datasets
from transformers import TrainingArguments
from transformers.utils import logging

from hf_speculate.errors import SpeculateError
from hf_speculate.messages import get_logger


logger = get_logger(__name__)


def check_launch(args: TrainingArguments) -> None:
    """Leaves one device to a process: `torch.nn.DataParallel`, which `Trainer` would use, knows nothing of the target.

    Raises:
        SpeculateError: FSDP of `Trainer` or accelerate. It would shard the head, and have all processes but the first
            load the target without its weights.
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
    """What is said is said by one process: the others log errors alone, and show no progress bars."""
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
    """Of this process among those that train together; 0 where it is the only one."""
    return int(os.environ.get("RANK", "0"))
