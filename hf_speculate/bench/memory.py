"""Peak memory of one call, as far as it can be had: allocator on accelerators, resident set on Linux, else nothing."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..drafting import Drafter


_MB = 1024 * 1024


def peak_memory(call: Callable[[], Any], device: torch.device) -> dict[str, Any] | None:
    """Runs `call` and says how much memory it took at most.

    Returns:
        `kind` ("allocated" on the accelerator, "resident" of the whole process), `peak_mb`, and `above_start_mb`: the
        part that was not there before the call, which leaves out the weights of all models that are loaded. None where
        the platform cannot tell.
    """
    if device.type == "cpu":
        return _resident(call)
    module = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        call()
        return None
    gc.collect()
    module.reset_peak_memory_stats(device)
    start = module.memory_allocated(device)
    call()
    return _found("allocated", start, module.max_memory_allocated(device))


def _resident(call: Callable[[], Any]) -> dict[str, Any] | None:
    """High-water mark of the resident set. What the allocator keeps of earlier calls is handed back before."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library: the figure holds what it keeps
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    start = None
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # sets the mark back
        start = _status("VmRSS")
    call()
    peak = None if start is None else _status("VmHWM")
    return None if start is None or peak is None else _found("resident", start, peak)


def _status(field: str) -> int | None:
    """Bytes; None where the system does not tell."""
    lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def _found(kind: str, start: int, peak: int) -> dict[str, Any]:
    return {"kind": kind, "peak_mb": peak / _MB, "above_start_mb": max(peak - start, 0) / _MB}


def drafter_mb(drafter: Drafter, target: nn.Module) -> float:
    """Weights of a drafter that are not the target's own."""
    shared = {parameter.data_ptr() for parameter in target.parameters()}
    modules = [value for value in vars(drafter).values() if isinstance(value, nn.Module)]
    own = {p.data_ptr(): p for module in modules for p in module.parameters() if p.data_ptr() not in shared}
    return sum(p.numel() * p.element_size() for p in own.values()) / _MB
