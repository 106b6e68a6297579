"""Speed and memory of training: whole steps of the methods, and the two forms of the loss at a large vocabulary.

Every figure comes from a process of its own, so that a peak is never that of something else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table

from hf_speculate.commands import default_target, environment, find_device, progress, synchronize
from hf_speculate.models import unwrap

from ..data import Batch, Collator, make_row
from ..methods import TrainingMethod, installed_methods, load_method
from ..run import MethodSection, adapted_target, build_method
from ..states import TargetReader
from ..target import DtypeName, TargetSection, load_target
from .losses import Form, Kind, LossShape, held_bytes, measure_loss, measure_peer_loss, peak_bytes, run_apart


_MIB = 2**20
_ADAPTER = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


@dataclass(frozen=True, kw_only=True)
class TrainBenchSettings:
    """What is measured.

    Attributes:
        target: path or Hub id; None is the bundled target.
        dtype: of the target.
        methods: names as in recipes; None: all that are installed.
        options: by method, sections `head` and `options` of a recipe; what is absent is the default.
        rows, length: of a batch: rows, and tokens of each (one document).
        repeats: steps; figures are medians over them, after one that is not counted.
        bf16: autocast.
        loss: shape for the forms of the loss; None leaves them out.
        speculators_python: interpreter that has the `speculators` package, whose loss is then measured beside ours.
        threads, device: of torch.
    """

    target: str | None = None
    dtype: DtypeName = "auto"
    methods: Sequence[str] | None = None
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: int = 4
    length: int = 256
    repeats: int = 5
    bf16: bool = False
    loss: LossShape | None = field(default_factory=LossShape)
    speculators_python: str | None = None
    threads: int | None = None
    device: str | None = None


def bench_train(settings: TrainBenchSettings) -> dict[str, Any]:
    """Measures; returns JSON-serialisable `methods` and `losses`."""
    target = settings.target or default_target()
    device = str(find_device(settings.device))
    shape = settings.loss
    methods = tuple(installed_methods()) if settings.methods is None else settings.methods
    losses: list[tuple[Form, Kind]] = []
    if shape is not None:
        losses = [("plain", "soft"), ("lean", "soft"), ("plain", "hard"), ("lean", "hard")]
    result: dict[str, Any] = {"bench": "train", "target": target, "settings": asdict(settings), "methods": []}
    with progress("train", total=len(methods) + len(losses)) as advance:
        for name in methods:
            result["methods"].append(run_apart(_measure_method, name, target, settings, device))
            advance(name)
        result["losses"] = []
        for form, kind in losses:
            figures = measure_loss(form, kind, shape, device=device, num_threads=settings.threads)
            result["losses"].append(asdict(figures))
            advance(f"{kind} {form}")
        if shape is not None and settings.speculators_python is not None:
            for kind in ("soft", "hard"):
                result["losses"].append(
                    measure_peer_loss(settings.speculators_python, kind, shape, num_threads=settings.threads)
                )
    return result | {"environment": environment(torch.device(device))}


def tables(result: dict[str, Any]) -> list[Table]:
    """The figures for people."""
    settings = result["settings"]
    batch = f"{settings['rows']} x {settings['length']} tokens"
    methods = _table(f"training step, {batch}", "tokens/s", "target s", "head s", "optimizer s", "peak MiB", "trained")
    for row in result["methods"]:
        seconds = (f"{row[name]:.3f}" for name in ("target_seconds", "head_seconds", "optimizer_seconds"))
        peak = f"{row['peak_bytes'] / _MIB:,.0f}"
        speed = f"{row['tokens_per_second']:,.0f}"
        methods.add_row(row["method"], speed, *seconds, peak, f"{row['trained_parameters']:,}")
    if not result["losses"]:
        return [methods]
    losses = _table(f"loss, V = {settings['loss']['vocab_size']:,}", "form", "s", "peak MiB", "memory of plain")
    plain = {row["kind"]: row["peak_bytes"] for row in result["losses"] if row["form"] == "plain"}
    for row in result["losses"]:
        peak, share = row["peak_bytes"], row["peak_bytes"] / max(plain[row["kind"]], 1)
        losses.add_row(row["kind"], row["form"], f"{row['seconds']:.2f}", f"{peak / _MIB:,.0f}", f"{share:.0%}")
    return [methods, losses]


def _measure_method(name: str, path: str, settings: TrainBenchSettings, device: str) -> dict[str, Any]:
    """Medians over whole steps; the peak is what a step needs beside the loaded target, head and optimizer included."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    place = torch.device(device)
    section = MethodSection(
        name=name,
        adapter=_ADAPTER if load_method(name).trains_target else {},
        **settings.options.get(name, {}),
    )
    loaded = load_target(TargetSection(path=path, dtype=settings.dtype), place)
    held = held_bytes(device)
    target = adapted_target(section, loaded)
    method = build_method(section, target, data=None)
    reader = TargetReader(target, method.feature_layers, train_target=method.trains_target)
    optimizer = torch.optim.AdamW([p for p in method.parameters() if p.requires_grad], lr=1e-4)
    batch = _batch(settings, unwrap(target).config.get_text_config(decoder=True).vocab_size)
    method.train()
    method.on_step(1, 1)  # of methods with stages: the last one
    steps = [_step(method, reader, optimizer, batch, place, settings.bf16) for _ in range(settings.repeats + 1)][1:]
    parts = {
        f"{part}_seconds": statistics.median(step[index] for step in steps)
        for index, part in enumerate(("target", "head", "optimizer"))
    }
    total = statistics.median(sum(step) for step in steps)
    return {
        "method": name,
        "tokens_per_second": settings.rows * settings.length / total,
        **parts,
        "peak_bytes": peak_bytes(device) - held,
        "trained_parameters": sum(p.numel() for p in method.parameters() if p.requires_grad),
    }


def _step(
    method: TrainingMethod,
    reader: TargetReader,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    device: torch.device,
    bf16: bool,
) -> tuple[float, float, float]:
    """Seconds of the target's forward, of the head's forward and backward, of the optimizer."""
    times = [_now(device)]
    states = reader(batch)
    times.append(_now(device))
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        loss = method(batch, states).loss
    loss.backward()
    times.append(_now(device))
    optimizer.step()
    optimizer.zero_grad()
    times.append(_now(device))
    return times[1] - times[0], times[2] - times[1], times[3] - times[2]


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def _batch(settings: TrainBenchSettings, vocab_size: int) -> Batch:
    """Random tokens: they cost what any tokens cost."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (settings.rows, settings.length), generator=generator)
    return Collator()([make_row([{"input_ids": row, "loss_mask": [True] * settings.length}]) for row in ids])


def _table(first: str, *columns: str) -> Table:
    table = Table()
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table
