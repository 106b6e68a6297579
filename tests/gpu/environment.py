"""Phase `env`: card, driver, versions, attention backends, missing packages, memory bandwidth."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from .setting import Setting
from .timing import single_us


PACKAGES = ("torch", "transformers", "triton", "huggingface_hub", "safetensors", "tokenizers", "jaxtyping")
# What only some phases need: the trainer's packages, and the test runner.
OPTIONAL = (
    "datasets",
    "pydantic",
    "dill",
    "multiprocess",
    "filelock",
    "peft",
    "gguf",
    "beartype",
    "hypothesis",
    "pytest",
)
_QUERY = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
_COPIED_BYTES, _TINY_BYTES = 1 << 31, 1 << 22


def measure(setting: Setting) -> None:
    """Writes one finding about the machine and one with its bandwidth."""
    setting.report(
        date=date.today().isoformat(),
        card=torch.cuda.get_device_name(setting.device) if setting.on_cuda else "cpu",
        nvidia_smi=_nvidia_smi() if setting.on_cuda else None,
        versions={name: _version(name) for name in PACKAGES},
        missing=[name for name in OPTIONAL if find_spec(name) is None],
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        python=platform.python_version(),
        cpus=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        attention={
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
            "math": torch.backends.cuda.math_sdp_enabled(),
            "priority": _priority(),
        },
        tf32=torch.backends.cuda.matmul.allow_tf32,
        **_device(setting),
    )
    setting.report(memory_bandwidth_gb_per_s=bandwidth(setting) / 1e9)


def bandwidth(setting: Setting) -> float:
    """Bytes per second that a large copy reads and writes."""
    count = _TINY_BYTES if setting.is_tiny else _COPIED_BYTES
    source = torch.ones(count, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    target.copy_(source)
    found = single_us([lambda: target.copy_(source)], setting.device, 7)["median"]
    return 2e6 * count / found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _priority() -> list[int] | None:
    order = getattr(torch._C, "_get_sdp_priority_order", None)
    return None if order is None else [int(each) for each in order()]


def _device(setting: Setting) -> dict[str, Any]:
    if not setting.on_cuda:
        return {}
    found = torch.cuda.get_device_properties(setting.device)
    return {
        "capability": [found.major, found.minor],
        "multiprocessors": found.multi_processor_count,
        "l2_mib": getattr(found, "L2_cache_size", 0) / 2**20,
        "memory_gib": found.total_memory / 2**30,
    }


def _nvidia_smi() -> str | None:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
