"""Clocks, medians and a progress bar."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from .reporting import LiteralConsole


def synchronize(device: torch.device) -> None:
    """Waits for the work queued on an accelerator; nothing to do on a CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds of wall clock and the result of `call`, the device synchronised around it."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - start, result


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr when that is a terminal; yields what is called after each step, with a word on the next one."""
    steps = TextColumn("{task.description}", style="progress.description", markup=False)
    columns = (steps, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    shown = LiteralConsole(stderr=True)
    with Progress(*columns, console=shown, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=total)
        yield lambda step: bar.update(task, advance=1, description=f"{title}: {step}")
