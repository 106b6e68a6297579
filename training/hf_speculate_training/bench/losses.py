"""Time and memory of the two forms of the losses, each in a process of its own: a peak is never that of another."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from hf_speculate.errors import SpeculateError

from ..methods import HardTargets, SoftTargets, Targets, Teacher, lean_cross_entropy, plain_cross_entropy


Form = Literal["plain", "lean"]
Kind = Literal["soft", "hard"]
Figures = TypeVar("Figures")


@dataclass(frozen=True, kw_only=True)
class LossShape:
    """What is measured.

    Attributes:
        num_entries: E, predictions of one batch.
        num_positions: T, positions of the teacher (soft only).
        hidden_size: of head and target.
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


@dataclass(frozen=True, kw_only=True)
class LossFigures:
    """One forward and backward: seconds (median of the repeats), and the peak of memory beyond weights and inputs."""

    form: Form
    kind: Kind
    seconds: float
    peak_bytes: int


def measure_loss(
    form: Form,
    kind: Kind,
    shape: LossShape | None = None,
    *,
    device: str = "cpu",
    num_threads: int | None = None,
    repeats: int = 3,
) -> LossFigures:
    """Runs a loss forward and backward in a fresh process."""
    return run_apart(_measure, form, kind, asdict(shape or LossShape()), device, num_threads, repeats)


def measure_peer_loss(
    python: str, kind: Kind, shape: LossShape, *, num_threads: int | None = None, repeats: int = 3
) -> dict[str, Any]:
    """The same for the loss of the `speculators` package, with the interpreter that it is installed for; on the CPU.

    Raises:
        SpeculateError: that interpreter cannot run it.
    """
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


def run_apart(measure: Callable[..., Figures], *arguments: Any) -> Figures:
    """Calls `measure` in a fresh process.

    An executor, not a Pool: where its process dies (out of memory) it says so, and does not wait for ever.
    """
    with ProcessPoolExecutor(1, mp_context=_fresh_processes()) as executor:
        return executor.submit(measure, *arguments).result()


def _fresh_processes() -> BaseContext:
    """Processes forked off a server that has imported what they need and done nothing else.

    Where that cannot be (an accelerator's driver does not survive a fork) each imports it anew, which takes seconds.
    """
    if sys.platform != "linux" or torch.accelerator.is_available():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _measure(form: Form, kind: Kind, shape: dict, device: str, num_threads: int | None, repeats: int) -> LossFigures:
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    loss = {"plain": plain_cross_entropy, "lean": lean_cross_entropy}[form]
    states, output, targets, weights = loss_inputs(LossShape(**shape), kind, device)
    # Whatever a first call loads and keeps is no memory of the loss.
    small = loss_inputs(LossShape(**{**shape, "num_entries": 8, "num_positions": 8, "vocab_size": 64}), kind, device)
    loss(*small).loss.backward()
    held = held_bytes(device)
    seconds = []
    for _ in range(repeats):
        states.grad = output.grad = None
        start = time.perf_counter()
        loss(states, output, targets, weights).loss.backward()
        if device != "cpu":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    peak = peak_bytes(device) - held
    return LossFigures(form=form, kind=kind, seconds=sorted(seconds)[len(seconds) // 2], peak_bytes=peak)


def loss_inputs(shape: LossShape, kind: Kind, device: str) -> tuple[torch.Tensor, torch.Tensor, Targets, torch.Tensor]:
    """States, output matrix, targets and weights, as both losses take them."""
    torch.manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    options = {"device": device, "dtype": dtype}
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


def held_bytes(device: str) -> int:
    """Bytes in use now."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # no /proc: what was used at most so far, a little more
        return peak_bytes(device)


def peak_bytes(device: str) -> int:
    """Bytes in use at most so far."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
