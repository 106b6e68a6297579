"""What would fail after hours, found before the first step: Hub, trackers, layout, evaluation, disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from torch import nn
from transformers import integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hf_speculate.errors import SpeculateError
from hf_speculate.hub import check_upload
from hf_speculate.models import unwrap

from ..data import RowDataset
from ..methods import TrainingMethod
from ..sections import RecipeError
from ..states import feature_bytes, is_foreign
from .arguments import HeadTrainingArguments
from .building import has_evaluation
from .evaluation import Prompt
from .inputs import RunData
from .recipe import Recipe


# Of the extra `trackers`; others have their own name.
_TRACKERS_EXTRA = ("tensorboard", "trackio")
_GIB = 2**30
# A trained parameter in a checkpoint: itself and the two moments of AdamW, in float32.
_CHECKPOINT_BYTES = 12


def check_services(recipe: Recipe, args: HeadTrainingArguments) -> None:
    """Trackers and the Hub, before anything is loaded.

    Raises:
        RecipeError: a tracker that is unknown or not installed; streamed data without a number of steps.
        UploadError: the repository cannot be written to.
    """
    _check_trackers(args.report_to)
    if recipe.data.streaming and args.max_steps < 1:
        raise RecipeError("data.streaming needs training.max_steps: a stream does not say how long it is.")
    if recipe.output.push_to_hub:
        check_upload(recipe.output.push_to_hub)


def check_output(recipe: Recipe, target: nn.Module, method: TrainingMethod) -> None:
    """Raises `SpeculateError` if the head cannot be written in the layout that is asked for."""
    try:
        method.check_layout(unwrap(target), recipe.output.layout)
    except SpeculateError as error:
        raise SpeculateError(f"output.layout={recipe.output.layout}: {error}") from error


def check_evaluation(recipe: Recipe, target: nn.Module, method: TrainingMethod, prompts: Sequence[Prompt]) -> None:
    """Raises `RecipeError` if acceptance is to be measured and cannot be, now or as the recipe says."""
    section = recipe.evaluation
    if not has_evaluation(recipe):
        if section.prompts is not None:
            raise RecipeError(
                "evaluation.prompts are given, but no evaluation data, and without these nothing is evaluated: set "
                "data.eval, or data.eval_fraction."
            )
        return
    if not section.num_prompts:
        return
    if not prompts:
        raise RecipeError(
            "no evaluation prompt can be made of the evaluation data: they hold no document of two tokens or more. "
            "Possible: evaluation.prompts (a file), other data, or evaluation.num_prompts=0 (the loss decides)."
        )
    try:
        method.evaluation_drafter(unwrap(target), section.nodes[0], **section.options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"evaluation.options cannot be used: {error}") from error


def check_disk(
    recipe: Recipe, args: HeadTrainingArguments, target: nn.Module, method: TrainingMethod, data: RunData
) -> None:
    """Raises `SpeculateError` if feature cache and checkpoints do not fit on their disks."""
    needs = [(recipe.output.folder, "checkpoints and head", _output_bytes(args, target, method))]
    rows = data.train.rows("train") if recipe.features.source == "cache" else None
    folder = feature_folder(recipe)
    if isinstance(rows, RowDataset) and not is_foreign(folder):
        needs.append((folder, "feature cache", feature_bytes(folder, unwrap(target), method.feature_layers, rows)))
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


def feature_folder(recipe: Recipe) -> str:
    """Where the recipe's feature cache is."""
    return recipe.features.folder or f"{recipe.output.folder}-features"


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
    """As transformers sees it; by name where it has no function for it."""
    test = getattr(integrations, f"is_{tracker.replace('_', '')}_available", None)
    return test() if test is not None else find_spec(tracker) is not None


def _output_bytes(args: HeadTrainingArguments, target: nn.Module, method: TrainingMethod) -> int:
    """At least: the checkpoints that are kept and the one being written, and the head with the target's matrices."""
    trained = sum(p.numel() for p in method.parameters() if p.requires_grad)
    kept = 0 if args.save_strategy == "no" else args.save_total_limit or 1
    shared = [unwrap(target).get_input_embeddings(), unwrap(target).get_output_embeddings()]
    head = sum(p.numel() * p.element_size() for module in shared if module is not None for p in module.parameters())
    return trained * _CHECKPOINT_BYTES * (kept + 1) + trained * 4 + head


def _existing(folder: str) -> Path:
    """The folder, or the nearest one above it that is there."""
    path = Path(folder).expanduser().resolve()
    return next(place for place in (path, *path.parents) if place.exists())
