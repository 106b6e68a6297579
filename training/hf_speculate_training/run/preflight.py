"""Checks before a long run for failures that would come after hours, and the plan of a run, for `--dry-run`."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from hf_speculate.attention import tree_backends
from hf_speculate.errors import SpeculateError, first_line
from hf_speculate.target import GenerativeModel
from hf_speculate_tools.hub import check_upload

from ..data import NO_DOCUMENT, Batch, RowDataset
from ..methods import TrainingMethod
from ..sections import RecipeError
from ..states import TargetReader, feature_bytes
from .builder import TrainingRun
from .recipe import Recipe
from .trainer import HeadTrainer, trainer_of


_GIB, _MIB = 2**30, 2**20
_CHECKPOINT_BYTES = 12  # a trained parameter and its two moments of AdamW, in float32
_ADAM_BYTES = 16  # the same, and its gradient
_SHOWN_TOKENS = 160


def check_services(recipe: Recipe, args: TrainingArguments) -> None:
    """Checks trackers and the Hub, before anything is loaded.

    Raises:
        RecipeError: a tracker is unknown or not installed.
        UploadError: the repository cannot be written to.
    """
    try:
        for tracker in get_reporting_integration_callbacks(args.report_to):
            tracker()
    except (ValueError, RuntimeError, ImportError) as error:
        raise RecipeError(f"training.report_to={args.report_to} cannot be used: {first_line(error)}") from error
    if recipe.output.push_to_hub:
        check_upload(recipe.output.push_to_hub)


def check_run(run: TrainingRun) -> None:
    """Raises `SpeculateError` if the parts of a run do not go together, or its head or evaluation cannot be made."""
    recipe, target, method = run.recipe, run.target, run.method
    if recipe.target.shard and recipe.features.source == "cache":
        raise RecipeError(
            "target.shard does not go with features.source=cache: processes would run the target unequally often."
        )
    if not any(parameter.requires_grad for parameter in method.parameters()):
        raise RecipeError(f"the method {method.name} has no parameter to train: look at method.head.")
    TargetReader(target, method.feature_layers)
    try:
        method.drafter(target).check_layout(recipe.output.layout)
    except SpeculateError as error:
        raise SpeculateError(f"output.layout={recipe.output.layout}: {error}") from error
    section = recipe.evaluation
    if not recipe.evaluates:
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
        method.evaluation_drafter(target, section.nodes[0], **section.options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"evaluation.options cannot be used: {error}") from error


def check_disk(run: TrainingRun) -> None:
    """Raises `SpeculateError` if feature cache and checkpoints do not fit on their disks."""
    folder, target = run.recipe.feature_folder, run.target
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


def describe_run(run: TrainingRun) -> RenderableType:
    """Tables about a prepared run: sizes, memory, steps, the first batch, which is run forward and backward."""
    with tempfile.TemporaryDirectory() as elsewhere:  # a trainer makes its output folder
        run.args.output_dir = elsewhere
        trainer = trainer_of(run, cached=False)
    batch: Any = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    steps, accumulated = trainer.num_steps(), run.args.gradient_accumulation_steps
    seconds, peak = _measured_step(run, trainer, batch)
    tokens = int((batch["document_ids"] != NO_DOCUMENT).sum())
    plan = {
        "optimizer steps": f"{steps:,}",
        "tokens per step": f"{tokens * accumulated * run.args.world_size:,}",
        "first batch, forward and backward": f"{seconds:.2f} s, {tokens / seconds:,.0f} tokens/s (measured)",
        "all steps at that speed": f"{seconds * steps * accumulated / 60:,.0f} min (computed, without evaluations)",
    }
    if peak is not None:
        plan["peak memory of that batch"] = f"{peak / _MIB:,.0f} MiB (measured, device)"
    shapes = {name: " x ".join(map(str, parameter.shape)) for name, parameter in run.method.named_parameters()}
    return Group(
        _table("memory", "MiB (computed)", _memory(run, batch)),
        _table("tensor of the head", "shape", shapes),
        _table("plan", "value", plan),
        Text("first row, what the target is to emit in bold:"),
        _rendered(batch, run.tokenizer),
    )


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


def _memory(run: TrainingRun, batch: Batch) -> dict[str, str]:
    """MiB of target, head and states, by what they are."""
    model = run.target
    trained = sum(p.numel() for p in run.method.parameters() if p.requires_grad)
    rows, length = batch["input_ids"].shape
    hidden = model.config.get_text_config(decoder=True).hidden_size
    kept = len(set(run.method.feature_layers)) + 1
    states = rows * length * hidden * kept * model.dtype.itemsize
    sizes = {
        f"target, {model.dtype}".replace("torch.", ""): sum(p.numel() * p.element_size() for p in model.parameters()),
        f"head, {trained:,} trained parameters with AdamW": trained * _ADAM_BYTES,
        f"target's states of a batch, {rows} x {length} x {kept} x {hidden}": states,
    }
    sizes["without activations, together"] = sum(sizes.values())
    return {name: f"{size / _MIB:,.1f}" for name, size in sizes.items()}


def _measured_step(run: TrainingRun, trainer: HeadTrainer, batch: Any) -> tuple[float, int | None]:
    """Seconds of the second of two passes, and peak memory of the device (None on a CPU)."""
    device = run.args.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = trainer.accelerator.prepare_model(run.method)
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        with tree_backends(device):
            cast(Tensor, trainer.compute_loss(model, batch)).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        model.zero_grad()
    return seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _rendered(batch: Batch, tokenizer: Any) -> Text:
    """The first row as text, with tokens under the loss in bold."""
    columns = (batch[name][0, :_SHOWN_TOKENS].tolist() for name in ("loss_mask", "document_ids", "input_ids"))
    text = Text()
    for (counts, document), tokens in groupby(zip(*columns, strict=True), key=lambda token: token[:2]):
        if document != NO_DOCUMENT:
            text.append(tokenizer.decode([token[2] for token in tokens]), style="bold" if counts else "dim")
    return text


def _table(name: str, value: str, rows: Mapping[str, str]) -> Table:
    table = Table()
    table.add_column(name, overflow="fold")
    table.add_column(value, justify="right", overflow="fold")
    for row in rows.items():
        table.add_row(*row)
    return table
