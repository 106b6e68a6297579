"""Training of a head on `transformers.Trainer`, which has the loop, precision, schedules, checkpoints and reports.

Its model is a `TrainingMethod`. The target stays outside, so neither the optimizer nor a checkpoint ever sees it.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    EarlyStoppingCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from hf_speculate.attention import tree_backends
from hf_speculate.errors import SpeculateError
from hf_speculate.messages import get_logger
from hf_speculate.target import adapter_fingerprints
from hf_speculate_tools.hub import card_facts, push_folder, write_card

from ..data import NO_DOCUMENT, Batch, Collator, DataOptions
from ..methods import TrainingMethod, shared_size
from ..states import TargetReader, write_features
from ..target import TargetSection, without_wrappers
from .arguments import HeadTrainingArguments
from .builder import TrainingRun, arguments_for, build
from .evaluation import AcceptanceEvaluation
from .folder import STATE_FILE, check_checkpoint, last_checkpoint, step_of
from .guards import DivergedError, DivergenceGuard, Interruption, diverged
from .optimizers import MuonWithAdamW
from .progress import TrainingProgress, messages_above_bars
from .provenance import describe_use, write_provenance
from .recipe import EvaluationSection, MethodSection


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = get_logger(__name__)

_SHARE = "share"  # key of a batch's share in the loss of its step


class HeadTrainer(Trainer):
    """Trains a head for a target.

    As with TRL's trainers a target, a method and a data set are enough:

        HeadTrainer("Qwen/Qwen2-0.5B-Instruct", method="eagle3", train_dataset=dataset).train()

    Args:
        target: the model that the head is to draft for (plain, PEFT-wrapped or quantised), or its folder, Hub id or
            GGUF file. It is read, never saved.
        method: the training method around its head; or the name of an installed method, whose head gets a shape for the
            target's size; or a `MethodSection` with the shape.
        args: arguments of the trainer; None for those of `hf-speculate train`, with a method by name.
        data_collator: function that makes a batch of rows; None for `Collator`.
        train_dataset, eval_dataset: a `datasets.Dataset` (or file, folder, Hub id) of messages, prompt + completion,
            text or token ids; or rows of `hf_speculate_training.data`, which may carry the target's states.
        processing_class: the target's tokenizer; None for the one saved with the target.
        evaluation: measurement of the mean acceptance length at every evaluation. None takes 16 prompts of
            `eval_dataset`, if that is raw data; False measures nothing.
        data_options: options for reading raw data, see `DataOptions`.
        callbacks, optimizers, optimizer_cls_and_kwargs: arguments of `Trainer`.

    Log entries are means since the last one: `loss` and the method's metrics (`accuracy_0`, …). An evaluation logs
    `eval_loss`, `eval_accuracy_0`, …, and `eval_mean_acceptance_length`, which `metric_for_best_model` can name.
    """

    _tag_names = ("hf-speculate", "speculative-decoding")
    _name = "head"

    def __init__(
        self,
        target: str | os.PathLike | PreTrainedModel | nn.Module,
        method: str | MethodSection | TrainingMethod = "eagle3",
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        evaluation: AcceptanceEvaluation | bool | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        data_options: DataOptions | None = None,
    ):
        is_path = isinstance(target, str | os.PathLike)
        given = TargetSection(path=os.fspath(target)) if is_path else without_wrappers(target)
        args = arguments_for(given, method) if args is None else args
        parts = build(
            args,
            given,
            method,
            train_dataset,
            eval_dataset,
            options=data_options,
            evaluation=EvaluationSection() if evaluation in (None, True) else evaluation or None,
            tokenizer=processing_class,
        )
        if data_collator is None and parts.tokenizer is not None:
            data_collator = Collator(parts.tokenizer.pad_token_id)
        self._interruption = Interruption()
        super().__init__(
            model=parts.method,
            args=args,
            data_collator=data_collator,
            train_dataset=parts.train_rows(),
            eval_dataset=parts.evaluation_rows(),
            processing_class=parts.tokenizer,
            callbacks=[DivergenceGuard(), self._interruption, *(callbacks or [])],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self._progress = TrainingProgress()
        if self.pop_callback(ProgressCallback) is not None:  # not where a notebook has its own
            self.add_callback(self._progress)
        self.target, self.method, self.evaluation = parts.target, parts.method, parts.evaluation
        self.reader = TargetReader(self.target, self.method.feature_layers)
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
        share = inputs.get(_SHARE)
        batch = cast(Batch, {name: value for name, value in inputs.items() if name != _SHARE})
        output = model(batch, self.reader(batch))
        self._collect("train" if model.training else "eval", output.metrics)
        loss = output.loss if share is None else output.loss * share
        return (loss, output) if return_outputs else loss

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of a step. Each counts by its tokens, so that several are like one large batch."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if len(batches) > 1:
            tokens = torch.stack([(batch["document_ids"] != NO_DOCUMENT).sum() for batch in batches])
            tokens = shared_size(tokens.to(device, torch.float32))
            for batch, share in zip(batches, tokens / tokens.mean(), strict=True):
                batch[_SHARE] = share
        return batches, num_items

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        # With a mask, cuDNN's attention made gradients of NaN on an H100 (pytorch#196678).
        with tree_backends(self.args.device):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise DivergedError(diverged("the loss", float(loss), self.args, self.state))
        return loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), tree_backends(self.args.device):
            loss = cast(Tensor, self.compute_loss(model, inputs))
        return loss.detach(), None, None

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs) -> EvalLoopOutput:
        """Measures loss and the method's metrics over the split, then acceptance in the decoding loop."""
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
        """Trains; `resume_from_checkpoint=True` resumes from the last complete checkpoint.

        From a checkpoint of the last step nothing is trained: it is loaded, or the best one if that is kept.

        Raises:
            SpeculateError: there is nothing to resume, or the checkpoint is of another head.
            DivergedError: the loss or a gradient is not a number.
            InterruptedTrainingError: Ctrl-C was pressed; a checkpoint was written first.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise SpeculateError(
                    f"nothing to resume: {self.args.output_dir} has no complete checkpoint. Start without resuming."
                )
        if resume_from_checkpoint:
            check_checkpoint(resume_from_checkpoint, self.method)
            if step_of(resume_from_checkpoint) >= self.num_steps():
                return self._restore(resume_from_checkpoint)
            self._resolve_shares()
        with (
            self._interruption.listening(self.args.world_size),
            messages_above_bars(),
            closing(self._progress),
        ):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def num_steps(self) -> int:
        """Optimizer steps of the whole run; raises `SpeculateError` if that is not known."""
        try:
            return self.set_initial_training_values(self.args, self.get_train_dataloader())[6]
        except ValueError as error:
            raise SpeculateError(f"training.max_steps must be set: the data have no length ({error}).") from error

    def _resolve_shares(self) -> None:
        """Turns shares of all steps into numbers, as a checkpoint has them: transformers compares the two."""
        for name in ("logging_steps", "eval_steps", "save_steps"):
            value = getattr(self.args, name)
            if value is not None and 0 < value < 1:
                setattr(self.args, name, math.ceil(self.num_steps() * value))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the head in its default layout with card and provenance; `Trainer` itself writes checkpoints."""
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
        elif self.args.should_save:
            folder = output_dir or str(self.args.output_dir)
            saved = self.method.save(folder, self.target)
            write_provenance(folder, self._origin())
            write_card(folder, **card_facts(folder, saved), repo_id=self.args.hub_model_id)

    def push_to_hub(
        self,
        commit_message: str | None = None,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Writes the head to `args.output_dir`, uploads it without checkpoints, and waits for the end.

        Arguments are those of `Trainer.push_to_hub`. The repository is `args.hub_model_id`, or the folder's name.

        Raises:
            UploadError: the Hub did not take the head, which is in the folder.
        """
        self.save_model()
        if not self.is_world_process_zero():
            return None
        return push_folder(
            str(self.args.output_dir),
            self.args.hub_model_id,
            private=self.args.hub_private_repo if private is None else private,
            token=token or self.args.hub_token,
            commit_message=commit_message,
            revision=revision,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads nothing: a checkpoint is not a head."""

    def _origin(self) -> dict[str, Any]:
        evaluations = [entry for entry in self.state.log_history if "eval_loss" in entry]
        return {
            "status": "complete",
            **describe_use(self.target, self.processing_class),
            "adapters": dict(adapter_fingerprints(self.target)),
            "head": {"method": self.method.name},
            "training": {"steps": self.state.global_step, "epochs": self.state.epoch},
            "metrics": evaluations[-1] if evaluations else {},
        }

    def _restore(self, checkpoint: str) -> TrainOutput:
        """Loads a checkpoint of the last step, from which `Trainer`'s own loop would train one more."""
        logger.warning(f"{checkpoint} is of the last step: nothing is left to train.")
        self.state = TrainerState.load_from_json(os.path.join(checkpoint, STATE_FILE))
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None and os.path.isdir(best):
            checkpoint = best
        self._load_from_checkpoint(checkpoint)
        return TrainOutput(self.state.global_step, 0.0, {})

    def _collect(self, mode: str, metrics: dict[str, Tensor]) -> None:
        """Adds metrics without waiting for the device; `_drain` reads them."""
        sums, counts = self._sums[mode], self._counts[mode]
        for name, value in metrics.items():
            value = torch.as_tensor(value, device=self.args.device, dtype=torch.float32).detach()
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


def trainer_of(run: TrainingRun, *, cached: bool = True) -> HeadTrainer:
    """A trainer for the run of a recipe. With `cached=False` all states are computed online, without the cache."""
    section, rows = run.recipe.evaluation, run.train_rows()
    trainer = HeadTrainer(
        run.target,
        run.method,
        run.args,
        train_dataset=rows,
        eval_dataset=run.evaluation_rows(section.num_rows),
        processing_class=run.tokenizer,
        evaluation=run.evaluation or False,
        callbacks=[EarlyStoppingCallback(section.patience)] if section.patience else None,
    )
    if cached and run.recipe.features.source == "cache":
        trainer.train_dataset = write_features(run.recipe.feature_folder, trainer.reader, rows)
    return trainer
