"""Checks before the first step for failures that would come after hours: Hub, trackers, layout, evaluation, disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from transformers import TrainingArguments, integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hf_speculate.errors import SpeculateError
from hf_speculate.models import GenerativeModel, unwrap
from hf_speculate_tools.hub import check_upload

from ..data import RowDataset
from ..methods import TrainingMethod
from ..sections import RecipeError
from ..states import feature_bytes
from .builder import TrainingRun
from .recipe import Recipe


# Trackers of the extra `trackers`; the packages of others have their name.
_TRACKERS_EXTRA = ("tensorboard", "trackio")
_GIB = 2**30
_CHECKPOINT_BYTES = 12  # a trained parameter and its two moments of AdamW, in float32


def check_services(recipe: Recipe, args: TrainingArguments) -> None:
    """Checks trackers and the Hub, before anything is loaded.

    Raises:
        RecipeError: a tracker is unknown or not installed.
        UploadError: the repository cannot be written to.
    """
    _check_trackers(args.report_to)
    if recipe.output.push_to_hub:
        check_upload(recipe.output.push_to_hub)


def check_run(run: TrainingRun) -> None:
    """Raises `SpeculateError` if the parts of a run do not go together, or its head or evaluation cannot be made."""
    recipe, target, method = run.recipe, unwrap(run.target), run.method
    if recipe.target.shard and recipe.features.source == "cache":
        raise RecipeError(
            "target.shard does not go with features.source=cache: processes would run the target unequally often."
        )
    try:
        method.drafter(target).check_layout(recipe.output.layout)
    except SpeculateError as error:
        raise SpeculateError(f"output.layout={recipe.output.layout}: {error}") from error
    _check_evaluation(run)


def _check_evaluation(run: TrainingRun) -> None:
    section = run.recipe.evaluation
    if not run.recipe.evaluates:
        if section.prompts is not None:
            raise RecipeError(
                "evaluation.prompts are given, but no evaluation data, and without these nothing is evaluated: set "
                "data.eval, or data.eval_fraction."
            )
        return
    if not section.num_prompts:
        return
    if run.evaluation is None:
        raise RecipeError(
            "no evaluation prompt can be made of the evaluation data: they hold no document of two tokens or more. "
            "Possible: evaluation.prompts (a file), other data, or evaluation.num_prompts=0 (the loss decides)."
        )
    try:
        run.method.evaluation_drafter(unwrap(run.target), section.nodes[0], **section.options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"evaluation.options cannot be used: {error}") from error


def check_disk(run: TrainingRun) -> None:
    """Raises `SpeculateError` if feature cache and checkpoints do not fit on their disks."""
    folder, target = run.recipe.feature_folder, unwrap(run.target)
    needs = [(str(run.folder), "checkpoints and head", _output_bytes(run.args, target, run.method))]
    rows = run.train_rows() if run.recipe.features.source == "cache" else None
    if isinstance(rows, RowDataset):
        needs.append((folder, "feature cache", feature_bytes(folder, target, run.method.feature_layers, rows)))
    disks: dict[int, list[tuple[str, str, int]]] = {}
    for need in needs:
        disks.setdefault(os.stat(_existing(need[0])).st_dev, []).append(need)
    for parts in disks.values():
        free = shutil.disk_usage(_existing(parts[0][0])).free
        if sum(num_bytes for _, _, num_bytes in parts) > free:
            listed = ", ".join(f"{what} in {folder} {size / _GIB:.2f} GiB" for folder, what, size in parts)
            raise SpeculateError(
                f"the disk is too small: {listed} (computed), and {free / _GIB:.2f} GiB are free. Possible: another "
                "folder, training.save_total_limit=1, features.source=online."
            )


def _check_trackers(names: str | Sequence[str] | None) -> None:
    given = [names] if isinstance(names, str) else list(names or ())
    for name in given:
        if name in ("none", "all"):
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            raise RecipeError(f"training.report_to={name}: unknown; possible: {', '.join(INTEGRATION_TO_CALLBACK)}.")
        if not _is_installed(name):
            package = "'hf-speculate[trackers]'" if name in _TRACKERS_EXTRA else name
            raise RecipeError(f"training.report_to={name}: {name} is not installed. pip install {package}")


def _is_installed(tracker: str) -> bool:
    """True if transformers finds the tracker, or a package of that name if it has no function for it."""
    test = getattr(integrations, f"is_{tracker.replace('_', '')}_available", None)
    return test() if test is not None else find_spec(tracker) is not None


def _output_bytes(args: TrainingArguments, target: GenerativeModel, method: TrainingMethod) -> int:
    """Bytes of the kept checkpoints, of one more, and of the head with the target's matrices; a lower bound."""
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad)
    kept = 0 if args.save_strategy == "no" else args.save_total_limit or 1
    shared = [target.get_input_embeddings(), target.get_output_embeddings()]
    head = sum(p.numel() * p.element_size() for module in shared if module is not None for p in module.parameters())
    return trained * _CHECKPOINT_BYTES * (kept + 1) + trained * 4 + head


def _existing(folder: str) -> Path:
    """The folder, or the nearest existing one above it."""
    path = Path(folder).expanduser().resolve()
    return next(place for place in (path, *path.parents) if place.exists())
