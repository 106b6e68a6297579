"""A run from recipe to head folder: prepare, train, measure, write."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_speculate.drafting import SavedHead
from hf_speculate.errors import SpeculateError, UploadError
from hf_speculate.messages import get_logger
from hf_speculate.speculator import AutoSpeculator, without_verdicts
from hf_speculate.target import adapter_fingerprints
from hf_speculate_plugins.origin import read_provenance
from hf_speculate_tools.check import measure_calibration
from hf_speculate_tools.hub import CURVES_FILE, card_facts, push_folder, write_card

from ..data import check_source, content_fingerprint
from ..target import is_sharded
from .arguments import quiet_replicas, rows_a_step, training_arguments
from .builder import TrainingRun, build
from .folder import checked_folder, is_finished, last_checkpoint, locked, recipe_file, refuse_locked, step_of
from .guards import InterruptedTrainingError
from .plots import plot_run
from .preflight import check_disk, check_run, check_services
from .provenance import check_same, describe_use, write_provenance, write_recipe
from .recipe import OutputSection, Recipe
from .trainer import HeadTrainer, trainer_of


logger = get_logger(__name__)


def train_head(recipe: Recipe, *, resume: bool = False) -> Path:
    """Runs a recipe; returns the folder of the finished head. Resuming a finished run changes nothing.

    Raises:
        SpeculateError: see `prepare`; or another process trains in the folder.
        DivergedError: the loss is not a number any more.
        InterruptedTrainingError: Ctrl-C was pressed; the message has the command that resumes the run.
        UploadError: the Hub did not take the head, which is complete; the message has the command that tries again.
    """
    folder = recipe.output.folder
    if resume and is_finished(folder, recipe.training):
        logger.warning(
            f"the run in {folder} is finished, its head is there: nothing was changed. For more steps: "
            "--set training.max_steps=... (or num_train_epochs) with --resume."
        )
        return Path(folder)
    run = prepare(recipe, resume=resume)
    known = _known(run)
    sessions = _sessions(run, known)
    logger.warning(f"training data {run.train.report.summary()}.")
    with locked(folder) if run.args.should_save else nullcontext():
        if run.args.should_save:
            checked_folder(folder, run.resume is not None)  # another run may have ended meanwhile
        leads = _train(run, known, sessions)
    if leads and recipe.output.push_to_hub:
        _push(recipe.output, run.method.name)
    return run.folder


def prepare(recipe: Recipe, *, resume: bool = False, write: bool = True) -> TrainingRun:
    """Loads the parts of a run, and finds out whatever would fail later.

    Args:
        recipe: the recipe.
        resume: True resumes from the last complete checkpoint in the output folder.
        write: True if the run is to write to that folder, which then must be empty or hold the run that is resumed.
    Raises:
        SpeculateError: recipe, target, data, folder, disk, trackers or Hub repository cannot be used. Nothing has been
            written then.
    """
    args = training_arguments(recipe)
    quiet_replicas(args)
    checkpoint = None
    if write and args.should_save:
        refuse_locked(recipe.output.folder)
        checkpoint = checked_folder(recipe.output.folder, resume)
    if resume and checkpoint is None:
        checkpoint = last_checkpoint(recipe.output.folder)
    check_services(recipe, args)
    data = recipe.data
    for source in filter(None, (data.train, data.eval)):
        check_source(source)  # before the target is loaded
    parts = build(args, recipe.target, recipe.method, data.train, data.eval, options=data, evaluation=recipe.evaluation)
    run = TrainingRun(**vars(parts), recipe=recipe, args=args, resume=checkpoint)
    check_run(run)
    run.use = run.use or describe_use(run.target, run.tokenizer)
    if write:
        check_disk(run)
    return run


def _train(run: TrainingRun, known: dict[str, Any], sessions: list[dict[str, Any]]) -> bool:
    """Does all but the upload; returns True in the process that writes."""
    trainer, output = trainer_of(run), run.recipe.output
    leads = trainer.is_world_process_zero()
    if leads:
        write_provenance(run.folder, {"status": "running", **known, "sessions": sessions})
        write_recipe(run.folder, run.recipe)
    started = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=run.resume)
    except InterruptedTrainingError as error:
        raise InterruptedTrainingError(error.checkpoint, _resume_command(run.folder)) from None
    sessions[-1] |= {"seconds": round(time.perf_counter() - started, 1), "to_step": trainer.state.global_step}
    history = list(trainer.state.log_history)  # before the last evaluation, which belongs to no curve
    saved = None
    if leads:  # first of all, since the rest may fail
        known |= {"sessions": sessions, "training": _outcome(trainer, sessions)}
        write_provenance(run.folder, {"status": "running", **known})
        saved = _write_head(run, output)
    metrics = trainer.evaluate() if run.recipe.evaluates else {}
    calibration = None
    if run.prompts and (leads or is_sharded(run.target)):
        with without_verdicts():
            calibration = measure_calibration(run.target, run.method.drafter(run.target), run.prompts)
    if saved is not None:
        _draw_curves(history, run)
        if calibration is not None:
            calibration.save(run.folder)
        write_provenance(run.folder, {"status": "complete", **known, "metrics": metrics})
        write_card(run.folder, **card_facts(run.folder, saved), repo_id=output.push_to_hub)
    trainer.accelerator.wait_for_everyone()
    return leads


def _write_head(run: TrainingRun, output: OutputSection) -> SavedHead:
    """Writes the head with its card, and loads it once to see that it can be."""
    saved = run.method.save(output.folder, run.target, output.layout)
    write_card(output.folder, **card_facts(output.folder, saved), repo_id=output.push_to_hub)
    AutoSpeculator.from_pretrained(output.folder, target=run.target)
    return saved


def _push(output: OutputSection, method: str) -> None:
    try:
        message = f"Upload {method} head"
        push_folder(output.folder, output.push_to_hub, private=output.private, commit_message=message)
    except SpeculateError as error:
        raise UploadError(
            f"the head is complete in {output.folder}, but it was not uploaded: {error} Try again: "
            f"hf-speculate push {shlex.quote(output.folder)} --repo-id {output.push_to_hub}"
        ) from error


def _draw_curves(history: list[Any], run: TrainingRun) -> None:
    """Draws the curves. A run is not lost for a picture."""
    try:
        title = f"{run.method.name} for {Path(run.recipe.target.path).name}"
        plot_run(history, run.folder / CURVES_FILE, title=title)
    except SpeculateError as error:
        logger.warning(f"no curves were drawn: {error}")


def _resume_command(folder: Path) -> str:
    """The command that resumes the run in `folder`, to be typed where it was started."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    program = "hf-speculate" if processes == 1 else "accelerate launch -m hf_speculate_training"
    return f"{program} train --config {shlex.quote(str(recipe_file(folder)))} --resume"


def _known(run: TrainingRun) -> dict[str, Any]:
    """The facts for provenance that are known before the first step."""
    parameters = [p for p in run.method.parameters() if p.requires_grad]
    vocabulary = run.method.draft_vocabulary
    report = {"train": asdict(run.train.report)}
    if run.recipe.data.eval is not None:
        report["eval"] = asdict(run.held_out.report)
    return {
        "recipe": run.recipe.to_dict(),
        "command": sys.argv,
        **(run.use or {}),
        "adapters": dict(adapter_fingerprints(run.target)),
        "data": report,
        "head": {
            "method": run.method.name,
            "trained_parameters": sum(p.numel() for p in parameters),
            "draft_vocabulary": None if vocabulary is None else content_fingerprint(vocabulary.tolist()),
        },
        "batch": {"rows_a_step": rows_a_step(run.args)},
        "seed": run.args.seed,
        "evaluation_prompts": len(run.prompts),
    }


def _sessions(run: TrainingRun, known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sessions so far and this one; raises `SpeculateError` if a run is resumed with other inputs."""
    sessions = []
    if run.resume:
        before = read_provenance(run.folder) or {}
        for kind in ("target", "data", "head", "batch"):
            if kind in before:
                check_same(kind, before[kind], known[kind], run.folder)
        sessions = list(before.get("sessions", []))
    step = step_of(run.resume) if run.resume else 0
    return [*sessions, {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "from_step": step}]


def _outcome(trainer: HeadTrainer, sessions: list[dict[str, Any]]) -> dict[str, Any]:
    """The outcome of training, for provenance."""
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
