"""What the hardware allows, and how often the host waits for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ..commands.timing import timed


_COPIED_BYTES = 1 << 28
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")


def memory_bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [timed(lambda: target.copy_(source), device)[0] for _ in range(repeats + 1)]
    return 2 * _COPIED_BYTES / statistics.median(seconds[1:])  # the first is warm-up


def bytes_read(model: Any) -> int:
    """Bytes of weights that a forward over a few tokens has to read: all, but of embeddings that are not tied."""
    embeddings, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    unread = 0 if embeddings is output else embeddings.nbytes
    parameters: Iterable[nn.Parameter] = model.parameters()
    return sum(parameter.nbytes for parameter in parameters) - unread


def host_waits(call: Callable[[], Any], device: torch.device) -> int | None:
    """How often the host waited for the device during `call`; None on a CPU."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        call()
    return count_waits(event.name for event in found.events() or ())


def count_waits(names: Iterable[str]) -> int:
    """Of names of the runtime's calls (`cudaStreamSynchronize`, `hipStreamSynchronize`, ...)."""
    return sum(name.endswith(_WAITS) for name in names)
