"""Training of a head on `transformers.Trainer`: the loop, precision, schedules, checkpoints and reports are its own.

What is trained is a `TrainingMethod`; the target stays outside, so neither the optimizer nor a checkpoint ever sees it.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_speculate.errors import SpeculateError
from hf_speculate.hub import write_card
from hf_speculate.models import unwrap

from ..data import Batch
from ..methods import TrainingMethod
from ..states import TargetReader
from .evaluation import AcceptanceEvaluation
from .optimizers import MuonWithAdamW


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_STATE_FILE = "trainer_state.json"  # the last file of a checkpoint that is written
_CHECKPOINT_FILES = (SAFE_WEIGHTS_NAME, "optimizer.pt", "scheduler.pt")


class DivergedError(SpeculateError, RuntimeError):
    """The loss or a gradient is not a number any more; the checkpoints hold what was good."""


@dataclass
class HeadTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the defaults of head training (EAGLE's optimizer, SpecForge's rate and clipping).

    Everything that `TrainingArguments` knows can be set. Different defaults: `learning_rate` 1e-4, `adam_beta2` 0.95,
    `lr_scheduler_type` "cosine", `warmup_steps` 4 % of all steps, `max_grad_norm` 0.5, `num_train_epochs` 10,
    `logging_steps` 10, `save_total_limit` 2, `logging_nan_inf_filter` False (a loss that is not a number stops the
    run), `remove_unused_columns` False and `label_names` (a batch is no model's arguments), tokens counted. New: `muon`
    and `adamw_learning_rate`, see `MuonWithAdamW`.
    """

    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate."})
    muon: bool = field(
        default=False,
        metadata={"help": "Muon for the layers' matrices at `learning_rate`, AdamW for the rest."},
    )
    adamw_learning_rate: float | None = field(
        default=None, metadata={"help": "Of that AdamW; None: half of `learning_rate`."}
    )
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta2 of AdamW."})
    lr_scheduler_type: Any = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Steps, or a share of all steps if below 1."})
    max_grad_norm: float = field(default=0.5, metadata={"help": "Norm to which gradients are clipped."})
    num_train_epochs: float = field(default=10.0, metadata={"help": "Passes over the data."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between two log entries."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept, the best one among them."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Not used: such a loss stops the run."})
    include_num_input_tokens_seen: Any = field(default="all", metadata={"help": "Count tokens, padding included."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay False."})
    label_names: list[str] | None = field(default_factory=lambda: ["loss_mask"], metadata={"help": "Not used."})


class HeadTrainer(Trainer):
    """Trains a head for a target.

    Args:
        target: the model that the head is to draft for: plain, PEFT-wrapped, quantised. It is read, never saved.
        method: what is trained and how its loss is computed.
        args: see `HeadTrainingArguments`.
        data_collator, train_dataset, eval_dataset: see `hf_speculate_training.data`; batches may carry the target's
            states, from a feature cache.
        processing_class: the target's tokenizer.
        evaluation: measures mean acceptance length at every evaluation; None does not.
        callbacks, optimizers, optimizer_cls_and_kwargs: as `Trainer` has them.

    Logged, averaged since the last entry: `loss` and what the method reports (`accuracy_0`, …); at an evaluation
    `eval_loss`, `eval_accuracy_0`, …, `eval_mean_acceptance_length`, which `metric_for_best_model` can name.
    """

    _tag_names = ("hf-speculate", "speculative-decoding")
    _name = "head"

    def __init__(
        self,
        target: PreTrainedModel | nn.Module,
        method: TrainingMethod,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        evaluation: AcceptanceEvaluation | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
    ):
        super().__init__(
            model=method,
            args=args or HeadTrainingArguments(output_dir=f"{type(method).__name__.lower()}-head"),
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[_Guard(method), *(callbacks or [])],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self.target = target
        self.method = method
        self.evaluation = evaluation
        self.reader = TargetReader(target, method.feature_layers, train_target=method.trains_target)
        self._sums: dict[str, dict[str, Tensor]] = {"train": {}, "eval": {}}
        self._counts: dict[str, dict[str, int]] = {"train": defaultdict(int), "eval": defaultdict(int)}

    def create_optimizer(self, model=None):
        if self.optimizer is None and getattr(self.args, "muon", False):
            self.optimizer = MuonWithAdamW(
                self.method.named_parameters(),
                self.args.learning_rate,
                adamw_lr=cast(HeadTrainingArguments, self.args).adamw_learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
                weight_decay=self.args.weight_decay,
            )
        return super().create_optimizer(model)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The method's loss on the target's states, computed now or taken from the batch."""
        batch = cast(Batch, inputs)
        output = model(batch, self.reader(batch))
        self._collect("train" if model.training else "eval", output.metrics)
        return (output.loss, output) if return_outputs else output.loss

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise DivergedError(diverged("the loss", float(loss), self.args, self.state))
        return loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss = cast(Tensor, self.compute_loss(model, inputs))
        return loss.detach(), None, None

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs) -> EvalLoopOutput:
        """Loss and the method's figures over the split, then acceptance through the decoding loop."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        metrics = self._drain("eval")
        if self.evaluation is not None:
            metrics |= self.evaluation.measure(self.target, self.method, self.accelerator)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})  # type: ignore
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs = {**logs, **self._drain("train")}
        super().log(logs, start_time)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """Trains; `resume_from_checkpoint=True` goes on from the last checkpoint that was written completely.

        Raises:
            SpeculateError: nothing to resume from, or a checkpoint of another head.
            DivergedError: the loss or a gradient is not a number.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise SpeculateError(
                    f"nothing to resume: {self.args.output_dir} has no complete checkpoint. Start without resuming."
                )
        if resume_from_checkpoint:
            check_checkpoint(resume_from_checkpoint, self.method)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Checkpoints hold the training state; called by a user, this writes the head in its default layout."""
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
        elif self.args.should_save:
            folder = output_dir or str(self.args.output_dir)
            write_card(folder, **asdict(self.method.save(folder, unwrap(self.target))))

    def _collect(self, mode: str, metrics: dict[str, Tensor]) -> None:
        """Adds without waiting for the device; `_drain` reads."""
        sums, counts = self._sums[mode], self._counts[mode]
        for name, value in metrics.items():
            value = torch.as_tensor(value, device=self.args.device).detach().float()
            sums[name] = sums[name] + value if name in sums else value
            counts[name] += 1

    def _drain(self, mode: str) -> dict[str, float]:
        """Means since the last call, over all processes."""
        sums, counts = self._sums[mode], self._counts[mode]
        if not sums:
            return {}
        means = torch.stack([sums[name] / counts[name] for name in sums])
        means = self.accelerator.reduce(means, "mean")
        result = dict(zip(sums, means.tolist(), strict=True))  # type: ignore[union-attr]
        sums.clear()
        counts.clear()
        return result


class _Guard(TrainerCallback):
    """Tells the method which step it is, and stops before the optimizer takes a gradient that is not a number."""

    def __init__(self, method: TrainingMethod):
        self.method = method

    def on_step_begin(self, args, state, control: TrainerControl, **kwargs) -> None:
        self.method.on_step(state.global_step, state.max_steps)

    def on_pre_optimizer_step(self, args, state, control: TrainerControl, **kwargs) -> None:
        optimizer = kwargs["optimizer"]
        if getattr(optimizer, "scaler", None) is not None:
            return  # of fp16: it skips such steps itself, they are how it finds its scale
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


def last_checkpoint(folder: str | os.PathLike | None) -> str | None:
    """The newest checkpoint in `folder` that was written completely; a run may have been killed while it wrote one."""
    root = Path(folder or ".")
    found = [path for path in root.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        if _is_complete(path):
            return str(path)
    return None


def _is_complete(checkpoint: Path) -> bool:
    try:
        state = json.loads((checkpoint / _STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    has_files = all((checkpoint / name).is_file() for name in _CHECKPOINT_FILES)
    return has_files and state.get("global_step") == int(checkpoint.name.rpartition("-")[2])


def check_checkpoint(checkpoint: str, method: nn.Module) -> None:
    """Raises `SpeculateError` unless the checkpoint holds exactly the tensors of `method`."""
    path = os.path.join(checkpoint, SAFE_WEIGHTS_NAME)
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, RuntimeError, ValueError) as error:
        raise SpeculateError(
            f"cannot resume from {checkpoint}: {SAFE_WEIGHTS_NAME} cannot be read ({error})."
        ) from error
    wanted = {name: tuple(tensor.shape) for name, tensor in method.state_dict().items()}
    different = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if different:
        name = different[0]
        raise SpeculateError(
            f"cannot resume from {checkpoint}: it holds another head. {len(different)} tensors differ, e.g. {name}: "
            f"{found.get(name, 'absent')} there, {wanted.get(name, 'absent')} in this one. Resume with the recipe that "
            "the run was started with, or start anew in another folder."
        )
