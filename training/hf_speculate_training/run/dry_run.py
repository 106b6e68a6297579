"""The plan of a run, for `--dry-run`: sizes, memory, steps, the first batch, one measured step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from hf_speculate.models import unwrap
from hf_speculate.scoring import tree_backends

from ..data import NO_DOCUMENT, Batch
from .builder import TrainingRun
from .run import trainer_of
from .trainer import HeadTrainer


_ADAM_BYTES = 16  # a parameter's weight, gradient and two moments, in float32
_MIB = 2**20
_SHOWN_TOKENS = 160


def describe_run(run: TrainingRun) -> RenderableType:
    """Tables about a prepared run. Runs forward and backward of the first batch, and changes nothing."""
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


def _memory(run: TrainingRun, batch: Batch) -> dict[str, str]:
    """MiB of target, head and states, by what they are."""
    model = unwrap(run.target)
    trained = sum(p.numel() for p in run.method.parameters() if p.requires_grad)
    rows, length = batch["input_ids"].shape
    hidden = model.config.get_text_config(decoder=True).hidden_size
    kept = len(set(run.method.feature_layers)) + 1
    sizes = {
        f"target, {model.dtype}".replace("torch.", ""): sum(p.numel() * p.element_size() for p in model.parameters()),
        f"head, {trained:,} trained parameters with AdamW": trained * _ADAM_BYTES,
        f"target's states of a batch, {rows} x {length} x {kept} x {hidden}": (
            rows * length * hidden * kept * model.dtype.itemsize
        ),
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
    text = Text()
    for ids, counts, document in _runs(batch["input_ids"][0], batch["loss_mask"][0], batch["document_ids"][0]):
        if document != NO_DOCUMENT:
            text.append(tokenizer.decode(ids), style="bold" if counts else "dim")
    return text


def _runs(input_ids: Tensor, loss_mask: Tensor, document_ids: Tensor) -> Iterator[tuple[list[int], bool, int]]:
    """Stretches of tokens of one document, all of them under the loss or none."""
    keys = list(zip(loss_mask.tolist(), document_ids.tolist(), strict=True))[:_SHOWN_TOKENS]
    ids, start = input_ids.tolist(), 0
    for end in range(1, len(keys) + 1):
        if end == len(keys) or keys[end] != keys[start]:
            yield ids[start:end], *keys[start]
            start = end


def _table(name: str, value: str, rows: Mapping[str, str]) -> Table:
    table = Table()
    table.add_column(name, overflow="fold")
    table.add_column(value, justify="right", overflow="fold")
    for row in rows.items():
        table.add_row(*row)
    return table
