"""Speed and memory of training: whole steps of the methods, and the forms of the loss at a large vocabulary.

Every figure comes from a process of its own, so that a peak is never that of something else.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import nn

from hf_speculate.errors import SpeculateError
from hf_speculate.target import unwrap
from hf_speculate_tools.commands import (
    Device,
    Grid,
    Repeats,
    default_target,
    environment,
    find_device,
    progress,
    synchronize,
)
from hf_speculate_training.data import Batch, Collator, make_row
from hf_speculate_training.methods import (
    HardTargets,
    SoftTargets,
    Targets,
    Teacher,
    installed_methods,
    lean_cross_entropy,
    plain_cross_entropy,
)
from hf_speculate_training.run import MethodSection, build_method
from hf_speculate_training.states import TargetReader
from hf_speculate_training.target import DtypeName, TargetSection, load_target

from .command import run


_MIB = 2**20

Kind = Literal["soft", "hard"]


@dataclass(frozen=True, kw_only=True)
class LossShape:
    """Sizes of a loss.

    Attributes:
        num_entries: E, predictions of one batch.
        num_positions: T, positions of the teacher (soft only).
        hidden_size: width of head and target.
        vocab_size: columns, draft and target alike.
        train_output: whether the output matrix gets a gradient (of the same size in both forms).
        dtype: "float32" or "bfloat16", of all tensors.
    """

    num_entries: int = 1024
    num_positions: int = 512
    hidden_size: int = 256
    vocab_size: int = 131072
    train_output: bool = True
    dtype: str = "float32"


@dataclass(kw_only=True)
class TrainSettings:
    """Options; figures are medians over the steps, after one that is not counted."""

    target: Annotated[str | None, typer.Option(help="Path or Hub id (default: examples/pycoder).")] = None
    methods: Annotated[list[str] | None, typer.Option("--method", "-m", help="Repeatable (default: all).")] = None
    dtype: Annotated[DtypeName, typer.Option(help="Dtype of the target (default: the checkpoint's).")] = "auto"
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 4
    length: Annotated[int, typer.Option(min=8, help="Tokens of a row.")] = 256
    repeats: Repeats = 5
    bf16: Annotated[bool, typer.Option("--bf16", help="Autocast.")] = False
    vocab: Annotated[int, typer.Option(min=0, help="Columns of the losses that are compared; 0: none.")] = 131072
    entries: Annotated[int, typer.Option(min=1, help="Predictions in those losses.")] = 1024
    speculators_python: Annotated[
        str | None, typer.Option(help="Interpreter with the `speculators` package: its loss beside ours, on the CPU.")
    ] = None
    device: Device = None


def bench_train(settings: TrainSettings) -> dict[str, Any]:
    """Tokens/s and memory of training by the methods, and the lean loss beside the plain one."""
    target, device = settings.target or default_target(), str(find_device(settings.device))
    shape = LossShape(num_entries=settings.entries, vocab_size=settings.vocab)
    threads, repeats = torch.get_num_threads(), 3
    names = tuple(installed_methods()) if settings.methods is None else settings.methods
    forms = [(form, kind) for kind in ("soft", "hard") for form in ("plain", "lean")] if settings.vocab else []
    result: dict[str, Any] = {"bench": "train", "target": target, "settings": asdict(settings)}
    result |= {"methods": [], "losses": []}
    with progress("train", total=len(names) + len(forms)) as advance:
        for name in names:
            result["methods"].append(run_apart(_measure_method, name, target, settings, device, threads))
            advance(name)
        for form, kind in forms:
            result["losses"].append(run_apart(_measure_loss, form, kind, shape, device, threads, repeats))
            advance(f"{kind} {form}")
        if forms and settings.speculators_python is not None:
            for kind in ("soft", "hard"):
                found = measure_peer_loss(settings.speculators_python, kind, shape, threads, repeats)
                result["losses"].append(found)
    return result | {"environment": environment(torch.device(device))}


def tables(result: dict[str, Any]) -> Sequence[Grid | str]:
    """Tables of the methods' steps and of the losses."""
    settings, losses = result["settings"], result["losses"]
    plain = {row["kind"]: row["peak_bytes"] for row in losses if row["form"] == "plain"}
    steps = {
        "training step": "{method}",
        "tokens/s": "{tokens_per_second:,.0f}",
        "target s": "{target_seconds:.3f}",
        "head s": "{head_seconds:.3f}",
        "optimizer s": "{optimizer_seconds:.3f}",
        "peak MiB": lambda row: f"{row['peak_bytes'] / _MIB:,.0f}",
        "trained": "{trained_parameters:,d}",
    }
    forms = {
        "loss": "{kind}",
        "form": "{form}",
        "s": "{seconds:.2f}",
        "peak MiB": lambda row: f"{row['peak_bytes'] / _MIB:,.0f}",
        "memory of plain": lambda row: f"{row['peak_bytes'] / max(plain[row['kind']], 1):.0%}",
    }
    found = [Grid.of(f"Steps of {settings['rows']} x {settings['length']} tokens", result["methods"], steps)]
    return [*found, Grid.of(f"Losses, V = {settings['vocab']:,}", losses, forms)] if losses else found


def measure_peer_loss(python: str, kind: str, shape: LossShape, num_threads: int, repeats: int = 3) -> dict[str, Any]:
    """Figures of the loss of the `speculators` package, by an interpreter that has it; on the CPU."""
    request = {"shape": asdict(shape), "kind": kind, "num_threads": num_threads, "repeats": repeats}
    command = [python, str(Path(__file__).with_name("peer_loss.py")), json.dumps(request)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise SpeculateError(f"cannot run {python}: {error}") from error
    except subprocess.CalledProcessError as error:
        raise SpeculateError(
            f"{python} cannot run the loss of `speculators`: {error.stderr.strip().splitlines()[-1:]}. It needs torch "
            "and speculators 0.9 (`make peers` makes such an environment)."
        ) from error
    return json.loads(done.stdout.splitlines()[-1])


def run_apart(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Calls `measure` in a fresh process.

    An executor, not a Pool: where its process dies (out of memory) it says so, and does not wait for ever.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(measure, *arguments).result()


def _measure_loss(form: str, kind: Kind, shape: LossShape, device: str, threads: int, repeats: int) -> dict[str, Any]:
    """Seconds of a forward and backward (median), and the peak of memory beyond weights and inputs."""
    torch.set_num_threads(threads)
    loss = {"plain": plain_cross_entropy, "lean": lean_cross_entropy}[form]
    states, output, targets, weights = loss_inputs(shape, kind, device)
    # What a first call loads and keeps is no memory of the loss.
    loss(*loss_inputs(replace(shape, num_entries=8, num_positions=8, vocab_size=64), kind, device)).loss.backward()
    held = _held_bytes(device)
    seconds = []
    for _ in range(repeats):
        states.grad = output.grad = None
        start = _now(device)
        loss(states, output, targets, weights).loss.backward()
        seconds.append(_now(device) - start)
    peak = _peak_bytes(device) - held
    return {"form": form, "kind": kind, "seconds": statistics.median(seconds), "peak_bytes": peak}


def loss_inputs(shape: LossShape, kind: Kind, device: str) -> tuple[torch.Tensor, torch.Tensor, Targets, torch.Tensor]:
    """States, output matrix, targets and weights, as both forms of the loss take them."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": getattr(torch, shape.dtype)}
    states = torch.randn(shape.num_entries, shape.hidden_size, **options).requires_grad_()
    output = torch.randn(shape.vocab_size, shape.hidden_size, **options).div_(shape.hidden_size**0.5)
    output.requires_grad_(shape.train_output)
    weights = torch.full((shape.num_entries,), 1 / shape.num_entries, device=device)
    if kind == "hard":
        return states, output, HardTargets(torch.randint(shape.vocab_size, weights.shape, device=device)), weights
    lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, **options).requires_grad_(False)
    hidden = torch.randn(shape.num_positions, shape.hidden_size, **options)
    index = torch.randint(shape.num_positions, weights.shape, device=device)
    rows = Teacher(lm_head, None, shape.vocab_size).read(hidden)
    return states, output, SoftTargets(rows, index), weights


def _measure_method(name: str, path: str, settings: TrainSettings, device: str, threads: int) -> dict[str, Any]:
    """Medians over whole steps; the peak is what a step needs beside the loaded target, head and optimizer included."""
    torch.set_num_threads(threads)
    place = torch.device(device)
    target = load_target(TargetSection(path=path, dtype=settings.dtype), place)
    held = _held_bytes(device)
    method = build_method(MethodSection(name=name), target, data=None)
    reader = TargetReader(target, method.feature_layers)
    trained = [p for p in method.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    batch = _batch(settings, unwrap(target).config.get_text_config(decoder=True).vocab_size)
    method.train()
    steps = []
    for _ in range(settings.repeats + 1):
        times = [_now(device)]
        states = reader(batch)
        times.append(_now(device))
        with torch.autocast(place.type, torch.bfloat16, enabled=settings.bf16):
            loss = method(batch, states).loss
        loss.backward()
        times.append(_now(device))
        optimizer.step()
        optimizer.zero_grad()
        times.append(_now(device))
        steps.append([after - before for before, after in pairwise(times)])
    medians = {
        f"{part}_seconds": statistics.median(step[index] for step in steps[1:])
        for index, part in enumerate(("target", "head", "optimizer"))
    }
    total = statistics.median(sum(step) for step in steps[1:])
    return {
        "method": name,
        "tokens_per_second": settings.rows * settings.length / total,
        **medians,
        "peak_bytes": _peak_bytes(device) - held,
        "trained_parameters": sum(p.numel() for p in trained),
    }


def _batch(settings: TrainSettings, vocab_size: int) -> Batch:
    """A batch of random tokens: they cost what any tokens cost."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (settings.rows, settings.length), generator=generator)
    return Collator()([make_row([{"input_ids": row, "loss_mask": [True] * settings.length}]) for row in ids])


def _now(device: str) -> float:
    synchronize(torch.device(device))
    return time.perf_counter()


def _held_bytes(device: str) -> int:
    """Bytes in use now."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # no /proc: the peak so far, a little more
        return _peak_bytes(device)


def _peak_bytes(device: str) -> int:
    """Largest number of bytes in use so far."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    run(TrainSettings, bench_train, tables)
