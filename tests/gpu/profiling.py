"""Profile of one call: launches, waits, pauses of the device, and the longest operations of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .setting import synchronize


# Parts of kernel names -> name of the attention that they belong to.
_ATTENTIONS = {"cudnn": "cudnn", "fmha_cutlass": "efficient", "flash": "flash", "softmax": "math", "_attend": "kernel"}
_NUM_LONGEST = 10


def profiled(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Profile of `call`, which must be warm.

    Returns:
        JSON-serialisable. `launches`, `graph_launches`, `synchronisations`, `copies`: number of calls of the runtime.
        `kernels`, `busy_ms`, `span_ms`: number of kernels and copies on the device, time in which it ran one, and time
        from the first to the last. `gaps`: the longest pauses of the device with what the host did then. `host`: the
        operations with the longest time of their own, `device`: kernels likewise. `attention`: kernels by backend.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    synchronize(device)
    with profile(activities=activities) as found:
        call()
        synchronize(device)
    averages = sorted(found.key_averages(), key=lambda each: -each.self_cpu_time_total)
    counts = Counter({each.key: each.count for each in averages})
    result: dict[str, Any] = {
        "launches": _count(counts, "LaunchKernel"),
        "graph_launches": _count(counts, "GraphLaunch"),
        "synchronisations": _count(counts, "Synchronize"),
        "copies": _count(counts, "Memcpy"),
        "host": [[each.key[:60], each.count, each.self_cpu_time_total / 1e3] for each in averages[:_NUM_LONGEST]],
    }
    if device.type == "cuda":
        result |= _timeline(found.events() or ())
    return result


def _count(counts: Counter[str], part: str) -> int:
    """Number of calls of CUDA's runtime or driver whose name has a part."""
    return sum(number for name, number in counts.items() if part in name and name.startswith(("cuda", "cu", "hip")))


def _timeline(events: Sequence[Any]) -> dict[str, Any]:
    on_device = [
        each
        for each in events
        if "CUDA" in str(each.device_type)
        and each.time_range.end > each.time_range.start
        and not getattr(each, "is_user_annotation", False)
    ]
    on_host = [each for each in events if "CPU" in str(each.device_type)]
    if not on_device:
        return {"kernels": 0}
    on_device.sort(key=lambda each: each.time_range.start)
    busy, gaps, end = 0.0, [], on_device[0].time_range.start
    for event in on_device:
        if event.time_range.start > end:
            gaps.append((event.time_range.start - end, end, event))
        busy += max(event.time_range.end - max(event.time_range.start, end), 0.0)
        end = max(end, event.time_range.end)
    gaps.sort(key=lambda gap: -gap[0])
    longest: Counter[str] = Counter()
    for event in on_device:
        longest[event.name[:60]] += event.time_range.end - event.time_range.start
    counts = Counter(event.name[:60] for event in on_device)
    attention = Counter(kind for each in on_device if (kind := _attention(each.name)))
    return {
        "kernels": len(on_device),
        "busy_ms": busy / 1e3,
        "span_ms": (end - on_device[0].time_range.start) / 1e3,
        "gaps": [
            {"ms": length / 1e3, "host": _during(on_host, start, start + length), "then": event.name[:60]}
            for length, start, event in gaps[:_NUM_LONGEST]
        ],
        "device": [[name, counts[name], took / 1e3] for name, took in longest.most_common(2 * _NUM_LONGEST)],
        "attention": dict(attention),
    }


def _attention(name: str) -> str | None:
    return next((kind for part, kind in _ATTENTIONS.items() if part in name.lower()), None)


def _during(events: Sequence[Any], start: float, end: float) -> str:
    """Name of the shortest operation of the host that covers most of a pause; "python" if none does."""
    covering = [
        (each.time_range.end - each.time_range.start, each.name)
        for each in events
        if min(each.time_range.end, end) - max(each.time_range.start, start) > 0.5 * (end - start)
    ]
    return min(covering)[1][:60] if covering else "python"
