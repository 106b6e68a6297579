"""A run from recipe to head folder: prepare, train, measure, write."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback, set_seed
from transformers.utils import logging

from hf_speculate.errors import SpeculateError
from hf_speculate.hub import (
    CUSTOM_GENERATE_FOLDER,
    clean_folder,
    describe_identity,
    make_repository,
    masked_arguments,
    publishable,
    upload_head,
    write_card,
)
from hf_speculate.models import unwrap
from hf_speculate.speculator import AutoSpeculator
from hf_speculate.target import adapter_fingerprints

from ..data import Collator, RowDataset
from ..fingerprints import content_fingerprint
from ..methods import ADAPTER_FOLDER, TrainingMethod
from ..sections import RecipeError
from ..states import write_features
from ..target import load_target, load_tokenizer
from .building import adapted_target, build_method, has_evaluation, training_arguments
from .evaluation import AcceptanceEvaluation, Prompt
from .inputs import RunData, load_data, load_prompts
from .plots import plot_run
from .provenance import (
    RECIPE_FILE,
    check_same,
    describe_target,
    file_hashes,
    public_files,
    read_provenance,
    refresh_hashes,
    write_provenance,
    write_recipe,
)
from .recipe import Recipe
from .trainer import HeadTrainer, HeadTrainingArguments, last_checkpoint


logger = logging.get_logger(__name__)

CURVES_FILE = "curves.png"


@dataclass
class Run:
    """Everything loaded, nothing trained or written yet.

    Attributes:
        prompts: on which acceptance is measured.
        resume: the checkpoint to go on from, None for a fresh run.
    """

    recipe: Recipe
    args: HeadTrainingArguments
    target: nn.Module
    tokenizer: Any
    data: RunData
    method: TrainingMethod
    prompts: list[Prompt]
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
            folder = self.recipe.features.folder or f"{self.folder}-features"
            with self.args.main_process_first(desc="feature cache"):
                trainer.train_dataset = write_features(folder, trainer.reader, cast(RowDataset, rows))
        return trainer


def prepare(recipe: Recipe, *, resume: bool = False, write: bool = True) -> Run:
    """Loads what a recipe names.

    Args:
        resume: go on from the last complete checkpoint in the output folder.
        write: whether the run is to write there: then the folder must be empty, or hold what is resumed.
    Raises:
        SpeculateError: whatever is wrong with recipe, target, data or folder; nothing has been written then.
    """
    args = training_arguments(recipe)
    checkpoint = _checked_folder(recipe.output.folder, resume) if write and args.should_save else None
    if resume and checkpoint is None:
        checkpoint = last_checkpoint(recipe.output.folder)
    set_seed(args.seed)  # fresh heads are drawn at random
    target = load_target(recipe.target, args.device)
    tokenizer = load_tokenizer(recipe.target)
    data = load_data(recipe.data, tokenizer, target)
    config = unwrap(target).config.get_text_config(decoder=True)
    prompts = load_prompts(recipe.evaluation, data, tokenizer, config.max_position_embeddings)
    target = adapted_target(recipe.method, target)
    method = build_method(recipe.method, target, data.train)
    if method.trains_target and recipe.features.source == "cache":
        raise RecipeError(f"{method.name} trains the target, whose states change: features.source must be online.")
    return Run(recipe, args, target, tokenizer, data, method, prompts, checkpoint)


def train_head(recipe: Recipe, *, resume: bool = False) -> Path:
    """Runs a recipe; returns the folder of the finished head.

    Raises:
        SpeculateError: see `prepare`; `DivergedError` if the loss is not a number any more.
    """
    run = prepare(recipe, resume=resume)
    known = _known(run)
    sessions = _sessions(run, known)
    trainer = run.trainer()
    if trainer.is_world_process_zero():
        write_provenance(run.folder, {"status": "running", **known, "sessions": sessions})
        write_recipe(run.folder, recipe)
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=run.resume)
    sessions[-1] |= {"seconds": round(time.perf_counter() - started, 1), "to_step": trainer.state.global_step}
    history = list(trainer.state.log_history)  # before the last evaluation, which is of the best head and no curve's
    metrics = trainer.evaluate() if has_evaluation(recipe) else {}
    if trainer.is_world_process_zero():
        known |= {"adapters": dict(adapter_fingerprints(unwrap(run.target)))}  # the method may have trained one
        write_provenance(run.folder, {"status": "running", **known, "sessions": sessions})
        write_head(run, metrics)
        _plot(history, run)
        outcome = {"training": _outcome(trainer, sessions), "metrics": metrics, "files": file_hashes(run.folder)}
        write_provenance(run.folder, {"status": "complete", **known, "sessions": sessions, **outcome})
        if recipe.output.push_to_hub:
            push(run.folder, recipe)
    trainer.accelerator.wait_for_everyone()
    return run.folder


def write_head(run: Run, metrics: Mapping[str, float]) -> None:
    """Writes the head in the recipe's layout with its card, and loads it once to see that it can be."""
    output = run.recipe.output
    saved = run.method.save(run.folder, unwrap(run.target), output.layout)
    measured = {name.removeprefix("eval_"): value for name, value in metrics.items() if "acceptance" in name}
    source = run.recipe.data.eval or run.recipe.data.train
    write_card(
        run.folder,
        **asdict(saved),
        metrics=measured,
        measured_on=f"{len(run.prompts)} held-out prompts of {Path(source).name}" if measured else None,
        notes=publishable(run.recipe.output.notes) or _notes(run),
        repo_id=output.push_to_hub,
    )
    AutoSpeculator.from_pretrained(run.folder, target=run.target)


def push(folder: Path, recipe: Recipe) -> None:
    """Uploads the head with card, provenance, recipe and curves; checkpoints and logs stay here, and private things."""
    assert recipe.output.push_to_hub is not None
    repo_id = make_repository(recipe.output.push_to_hub, private=recipe.output.private)
    with tempfile.TemporaryDirectory() as staged:
        for path in public_files(folder):
            shutil.copy2(path, staged)
        for name in (ADAPTER_FOLDER, CUSTOM_GENERATE_FOLDER):
            if (folder / name).is_dir():
                shutil.copytree(folder / name, Path(staged) / name)
        clean_folder(staged)
        refresh_hashes(staged)
        upload_head(staged, repo_id, commit_message=f"Upload {recipe.method.name} head")


def _checked_folder(folder: str, resume: bool) -> str | None:
    """The checkpoint to resume from; raises `SpeculateError` for a folder that cannot be used as asked."""
    checkpoint = last_checkpoint(folder) if os.path.isdir(folder) else None
    if resume and checkpoint is None:
        raise SpeculateError(f"nothing to resume: {folder} has no complete checkpoint. Start without --resume.")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise SpeculateError(f"the output folder {folder} is a file.")
    if not resume and os.path.isdir(folder) and os.listdir(folder):
        hint = f"resume the run in it (--resume, from {Path(checkpoint).name})" if checkpoint else "remove it"
        raise SpeculateError(f"the output folder {folder} is not empty: {hint}, or choose another one.")
    return checkpoint


def _known(run: Run) -> dict[str, Any]:
    """What is known before the first step."""
    parameters = [p for p in run.method.parameters() if p.requires_grad]
    vocabulary = run.method.draft_vocabulary
    return {
        "recipe": run.recipe.to_dict(),
        "command": masked_arguments(sys.argv),
        "target": describe_target(run.target),
        "identity": describe_identity(unwrap(run.target)),
        "data": run.data.report,
        "head": {
            "method": run.method.name,
            "trained_parameters": sum(p.numel() for p in parameters),
            "draft_vocabulary": None if vocabulary is None else content_fingerprint(vocabulary.tolist()),
        },
        "seed": run.args.seed,
        "evaluation_prompts": len(run.prompts),
    }


def _sessions(run: Run, known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sessions so far and this one; raises `SpeculateError` if a run is resumed with other inputs."""
    sessions = []
    if run.resume:
        before = read_provenance(run.folder) or {}
        for kind in ("target", "data", "head"):
            if kind in before:
                check_same(kind, before[kind], known[kind], run.folder)
        sessions = list(before.get("sessions", []))
    step = int(run.resume.rpartition("-")[2]) if run.resume else 0
    return [*sessions, {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "from_step": step}]


def _outcome(trainer: HeadTrainer, sessions: list[dict[str, Any]]) -> dict[str, Any]:
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
        "best_step": int(best.rpartition("-")[2]) if best else None,
        "best_metric": {trainer.args.metric_for_best_model: state.best_metric} if best else None,
    }


def _plot(history: list[Any], run: Run) -> None:
    """The curves; a run is not lost for a picture."""
    try:
        plot_run(history, run.folder / CURVES_FILE, title=f"{run.method.name} for {Path(run.recipe.target.path).name}")
    except SpeculateError as error:
        logger.warning(f"no curves were drawn: {error}")


def _notes(run: Run) -> str:
    data = run.recipe.data
    return (
        f"Trained with hf-speculate, method `{run.method.name}`, on `{Path(data.train).name}`. "
        f"Recipe: `{RECIPE_FILE}`; versions, data fingerprint, hardware, metrics: `provenance.json`; "
        f"curves: `{CURVES_FILE}`."
    )
