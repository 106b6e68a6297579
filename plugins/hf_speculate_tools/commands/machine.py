"""Versions, devices and clocks of this machine."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.attention

from hf_speculate.attention import backends_in_use, kernel_fits
from hf_speculate.errors import SpeculateError, first_line
from hf_speculate.speculator import installed_drafters

from .checks import check_dtype


_PACKAGES = ("hf-speculate", "transformers", "torch", "huggingface_hub", "safetensors", "tokenizers")
_OPTIONAL_PACKAGES = ("accelerate", "peft", "bitsandbytes", "gguf", "datasets")
# Kernels that transformers takes for attention and recurrent layers where they are installed.
_KERNEL_PACKAGES = ("flash-attn", "flash-linear-attention", "causal-conv1d", "kernels")


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Versions, hardware and thread count as JSON-serialisable values, for bug reports and benchmark results."""
    versions = {name: _version(name) for name in (*_PACKAGES, *_OPTIONAL_PACKAGES, *_KERNEL_PACKAGES)}
    return {
        "versions": {name: number for name, number in versions.items() if number or name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _processor_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "device": _device_name(device),
        "cuda": torch.version.cuda,
        "flash_attention": _flash_attention(),
        **_attention(device or find_device(None)),
        "drafters": sorted(installed_drafters()),
    }


def _flash_attention() -> str:
    """The implementation of flash attention in this process. Since torch 2.13, code may replace it for all models."""
    replaced = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return replaced or "torch"


def _attention(device: torch.device) -> dict[str, Any]:
    """Attention backends of our forwards, whether captured ones have a kernel, and whether other forwards may use
    cuDNN's; nothing where there is no choice."""
    backends = backends_in_use(device)
    if not backends:
        return {}
    return {
        "attention": backends,
        "kernel_for_trees": kernel_fits(torch.bfloat16, device),
        "cudnn_in_plain_generate": torch.backends.cuda.cudnn_sdp_enabled(),
    }


def drafter_list() -> list[dict[str, str]]:
    """Name, object, distribution and version of every installed drafter. Imports none of them."""
    return [
        {
            "name": name,
            "object": point.value,
            "distribution": point.dist.name if point.dist else "",
            "version": point.dist.version if point.dist else "",
        }
        for name, point in installed_drafters().items()
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_name(device: torch.device | None) -> str:
    device = device or find_device(None)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@cache
def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def find_device(name: str | None) -> torch.device:
    """A device by name, the accelerator (if there is one) by default; raises `SpeculateError`."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device, dtype=torch.float32)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SpeculateError(f"cannot use device {name!r}: {first_line(error)}") from error
    return device


def find_dtype(name: str) -> torch.dtype:
    """float32, bfloat16, float16 or float64 by name; raises `SpeculateError`."""
    check_dtype(name)
    return getattr(torch, name)


def synchronize(device: torch.device) -> None:
    """Waits for the work queued on an accelerator. On a CPU there is nothing to wait for."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Wall-clock seconds and result of `call`, with the device synchronised before and after."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - start, result


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
