"""A run from recipe to head folder: prepare, train, measure, write."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback, set_seed

from hf_speculate.hub import (
    card_facts,
    read_provenance,
    refresh_hashes,
    write_card,
)
from hf_speculate.messages import get_logger, masked_arguments
from hf_speculate.models import unwrap
from hf_speculate.target import adapter_fingerprints

from ..data import Collator, RowDataset
from ..fingerprints import content_fingerprint
from ..methods import TrainingMethod
from ..sections import RecipeError
from ..states import ForeignFeatures, is_foreign, write_features
from ..target import (
    TargetSection,
    check_sharding,
    in_turn,
    is_sharded,
    load_target,
    load_tokenizer,
    mesh_of_processes,
    shard_layers,
)
from .arguments import HeadTrainingArguments
from .building import adapted_target, build_method, has_evaluation, training_arguments
from .checkpoints import last_checkpoint, step_of
from .evaluation import AcceptanceEvaluation, Prompt
from .finishing import calibration_of, draw_curves, outcome_of, push_head, resume_command, write_head
from .guards import InterruptedTrainingError
from .inputs import RunData, load_data, load_prompts
from .launch import check_launch, quiet_replicas, rows_a_step
from .output_folder import checked_folder, is_finished, locked, refuse_locked
from .preflight import check_disk, check_evaluation, check_output, check_services, feature_folder
from .provenance import check_same, describe_use, write_provenance, write_recipe
from .recipe import Recipe
from .trainer import HeadTrainer


logger = get_logger(__name__)


@dataclass
class Run:
    """Everything loaded, nothing trained or written yet.

    Attributes:
        prompts: on which acceptance is measured.
        use: of the target and the tokenizer, see `describe_use`.
        resume: the checkpoint to go on from, None for a fresh run.
    """

    recipe: Recipe
    args: HeadTrainingArguments
    target: nn.Module
    tokenizer: Any
    data: RunData
    method: TrainingMethod
    prompts: list[Prompt]
    use: Mapping[str, Any]
    resume: str | None = None

    @property
    def folder(self) -> Path:
        return Path(self.recipe.output.folder)

    def trainer(self, features: bool = True) -> HeadTrainer:
        """A trainer for all of it.

        Args:
            features: write the feature cache that the recipe asks for; False computes all states online.
        """
        section, evaluated = self.recipe.evaluation, self.data.evaluation is not None
        rows = self.data.train.rows("train")
        callbacks: list[TrainerCallback] = [EarlyStoppingCallback(section.patience)] if section.patience else []
        trainer = HeadTrainer(
            self.target,
            self.method,
            self.args,
            data_collator=Collator(self.tokenizer.pad_token_id),
            train_dataset=rows,
            eval_dataset=self.data.evaluation_rows(section.num_rows) if evaluated else None,
            processing_class=self.tokenizer,
            evaluation=AcceptanceEvaluation(self.prompts, section) if evaluated and self.prompts else None,
            callbacks=callbacks,
        )
        if features and self.recipe.features.source == "cache":
            folder, rows = feature_folder(self.recipe), cast(RowDataset, rows)
            read = ForeignFeatures if is_foreign(folder) else write_features
            trainer.train_dataset = read(folder, trainer.reader, rows)
        return trainer


def prepare(recipe: Recipe, *, resume: bool = False, write: bool = True) -> Run:
    """Loads what a recipe names, and finds out what would fail later.

    Args:
        resume: go on from the last complete checkpoint in the output folder.
        write: whether the run is to write there: then the folder must be empty, or hold what is resumed.
    Raises:
        SpeculateError: whatever is wrong with recipe, target, data, folder, disk, trackers or Hub repository; nothing
            has been written then.
    """
    args = training_arguments(recipe)
    check_launch(args)
    quiet_replicas(args)
    checkpoint = None
    if write and args.should_save:
        refuse_locked(recipe.output.folder)
        checkpoint = checked_folder(recipe.output.folder, resume)
    if resume and checkpoint is None:
        checkpoint = last_checkpoint(recipe.output.folder)
    check_services(recipe, args)
    set_seed(args.seed)  # fresh heads are drawn at random
    target, tokenizer, use = _loaded(recipe.target, args.device)
    with args.main_process_first(desc="data"):  # the others find them converted and tokenised
        data = load_data(recipe.data, tokenizer, target)
    config = unwrap(target).config.get_text_config(decoder=True)
    prompts = load_prompts(recipe.evaluation, data, tokenizer, config.max_position_embeddings)
    target = adapted_target(recipe.method, target)
    method = build_method(recipe.method, target, data.train)
    if method.trains_target and recipe.features.source == "cache":
        raise RecipeError(f"{method.name} trains the target, whose states change: features.source must be online.")
    if recipe.target.shard and (method.trains_target or recipe.features.source == "cache"):
        other = f"method {method.name}, which trains the target" if method.trains_target else "features.source=cache"
        raise RecipeError(f"target.shard does not go with {other}: processes would run the target unequally often.")
    check_output(recipe, target, method)
    check_evaluation(recipe, target, method, prompts)
    use = use or describe_use(target, tokenizer)
    run = Run(recipe, args, target, tokenizer, data, method, prompts, use, checkpoint)
    if write:
        check_disk(recipe, args, target, method, data)
    return run


def _loaded(section: TargetSection, device: torch.device) -> tuple[nn.Module, Any, dict[str, Any] | None]:
    """Target, tokenizer, and what `describe_use` says where it has to be asked before layers are shared out."""
    if not section.shard:
        return load_target(section, device), load_tokenizer(section), None
    check_sharding(section)
    mesh = mesh_of_processes(device)
    with in_turn():
        target, tokenizer = load_target(section, torch.device("cpu")), load_tokenizer(section)
        use = describe_use(target, tokenizer)
        shard_layers(target, mesh)
    return target, tokenizer, use


def train_head(recipe: Recipe, *, resume: bool = False) -> Path:
    """Runs a recipe; returns the folder of the finished head. Resuming a finished run changes nothing.

    Raises:
        SpeculateError: see `prepare` and `train_prepared`.
    """
    if resume and is_finished(recipe):
        folder = recipe.output.folder
        logger.warning(
            f"the run in {folder} is finished, its head is there: nothing was changed. For more steps: "
            "--set training.max_steps=... (or num_train_epochs) with --resume."
        )
        return Path(folder)
    return train_prepared(prepare(recipe, resume=resume))


def train_prepared(run: Run) -> Path:
    """Trains what `prepare` gave, writes the head, then measures and uploads it; returns its folder.

    Raises:
        SpeculateError: another process trains in the folder.
        DivergedError: the loss is not a number any more.
        InterruptedTrainingError: Ctrl-C; says with which command the run goes on.
        UploadError: the head is there, but the Hub did not take it; says with which command it is tried again.
    """
    known = _known(run)
    sessions = _sessions(run, known)
    logger.warning(f"training data {run.data.train.report.summary()}.")
    with locked(run.folder) if run.args.should_save else nullcontext():
        if run.args.should_save:
            checked_folder(str(run.folder), run.resume is not None)  # another run may have ended meanwhile
        leads = _train(run, known, sessions)
    if leads and run.recipe.output.push_to_hub:
        push_head(run.recipe)
    return run.folder


def _train(run: Run, known: dict[str, Any], sessions: list[dict[str, Any]]) -> bool:
    """Everything but the upload; returns whether this process is the one that writes."""
    trainer = run.trainer()
    leads = trainer.is_world_process_zero()
    if leads:
        write_provenance(run.folder, {"status": "running", **known, "sessions": sessions})
        write_recipe(run.folder, run.recipe)
    started = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=run.resume)
    except InterruptedTrainingError as error:
        raise InterruptedTrainingError(error.checkpoint, resume_command(run.folder)) from None
    sessions[-1] |= {"seconds": round(time.perf_counter() - started, 1), "to_step": trainer.state.global_step}
    history = list(trainer.state.log_history)  # before the last evaluation, which is of the best head and no curve's
    saved = None
    if leads:  # before anything else, which may fail: then the head is there
        known |= {"adapters": dict(adapter_fingerprints(unwrap(run.target)))}  # the method may have trained one
        known |= {"sessions": sessions, "training": outcome_of(trainer, sessions)}
        write_provenance(run.folder, {"status": "running", **known})
        saved = write_head(run.recipe, run.method, run.target)
    metrics = trainer.evaluate() if has_evaluation(run.recipe) else {}
    calibration = calibration_of(run.method, run.target, run.prompts) if leads or is_sharded(run.target) else None
    if saved is not None:
        title = f"{run.method.name} for {Path(run.recipe.target.path).name}"
        draw_curves(history, run.folder, title)
        if calibration is not None:
            calibration.save(run.folder)
        write_provenance(run.folder, {"status": "complete", **known, "metrics": metrics})
        write_card(run.folder, **card_facts(run.folder, saved), repo_id=run.recipe.output.push_to_hub)
        refresh_hashes(run.folder)
    trainer.accelerator.wait_for_everyone()
    return leads


def _known(run: Run) -> dict[str, Any]:
    """What is known before the first step."""
    parameters = [p for p in run.method.parameters() if p.requires_grad]
    vocabulary = run.method.draft_vocabulary
    return {
        "recipe": run.recipe.to_dict(),
        "command": masked_arguments(sys.argv),
        **run.use,
        "data": run.data.report,
        "head": {
            "method": run.method.name,
            "trained_parameters": sum(p.numel() for p in parameters),
            "draft_vocabulary": None if vocabulary is None else content_fingerprint(vocabulary.tolist()),
        },
        "batch": {"rows_a_step": rows_a_step(run.args)},
        "seed": run.args.seed,
        "evaluation_prompts": len(run.prompts),
    }


def _sessions(run: Run, known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sessions so far and this one; raises `SpeculateError` if a run is resumed with other inputs."""
    sessions = []
    if run.resume:
        before = read_provenance(run.folder) or {}
        for kind in ("target", "data", "head", "batch"):
            if kind in before:
                check_same(kind, before[kind], known[kind], run.folder)
        sessions = list(before.get("sessions", []))
    step = step_of(run.resume) if run.resume else 0
    return [*sessions, {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "from_step": step}]
