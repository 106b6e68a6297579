"""Keeps measured round costs in the user's cache folder, so that a new process begins with them.

The file's name is a hash of everything that costs depend on. It shows the policy how costs compare; the first rounds of
a process show how fast the machine is now. Nothing here raises: a file that cannot be read or written is ignored.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import nn

from ..errors import SpeculateError
from ..files import json_writer, read_json, replace_files
from .contract import PolicyRequest
from .costs import RoundCosts
from .machine import OtherProcesses


SWITCH = "HF_SPECULATE_KEEP_COSTS"  # "0" turns reading and writing off
_PARTS = ("rounds", "drafting", "asking")
_EVERY_SECONDS = 60.0  # between two writes
_MAX_BYTES = 1 << 16
_MAX_CONTEXT, _MAX_SIZE, _MAX_SECONDS = 1 << 24, 1 << 12, 600.0  # larger values in a file are not believed
_REPEATS = 3  # one warm-up, then enough observations to be reliable
# Configuration fields that determine how much a forward computes.
_SHAPE = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_key_value_heads", "num_experts")


class KeptCosts(RoundCosts):
    """Round costs that begin with what earlier processes measured for similar requests."""

    def __init__(self, request: PolicyRequest):
        self._path = _path(request)
        self._others = None if self._path is None else OtherProcesses()
        self._next_write = 0.0
        known = None if self._path is None else _read(self._path)
        super().__init__(known, request.widths)
        self._num_known = 0 if known is None else sum(map(len, _observations(known).values()))

    def keep(self) -> None:
        """Writes the costs to disk about once a minute, on a thread, as a disk may be slow.

        A process that has hardly drafted writes nothing: it would overwrite what an earlier process has learnt. Nor
        does one while other processes keep the machine busy: its costs do not hold when they have ended.
        """
        if self._others is None or time.monotonic() < self._next_write or not self.rounds.is_established(1):
            return
        content = _observations(self)
        if not content["drafting"] or sum(map(len, content.values())) < self._num_known:
            return
        are_in_the_way = self._others.are_in_the_way()
        if are_in_the_way is None:
            return
        self._next_write = time.monotonic() + _EVERY_SECONDS
        if are_in_the_way:
            return
        with suppress(RuntimeError):  # no more threads
            Thread(target=_write, args=(self._path, content)).start()


def _observations(costs: RoundCosts) -> dict[str, list[tuple[int, int, float]]]:
    return {part: getattr(costs, part).observations() for part in _PARTS}


def _write(path: Path, content: dict[str, Any]) -> None:
    with suppress(SpeculateError, OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_files(path.parent, {path.name: json_writer(content)})


def _path(request: PolicyRequest) -> Path | None:
    """The file for similar requests; None if nothing is to be kept."""
    own = os.environ.get("XDG_CACHE_HOME", "")
    folder = own if os.path.isabs(own) else os.path.expanduser("~/.cache")
    if os.environ.get(SWITCH) == "0" or not request.drafter or not os.path.isabs(folder):
        return None
    target, config = request.target, request.target.config.get_text_config(decoder=True)
    facts = (
        device_name(target.device),
        (target.device.type, target.dtype, torch.__version__, torch.get_num_threads()),
        sorted({_kind(module) for module in target.modules()}),  # includes packed layers and adapters
        [getattr(config, field, None) for field in (*_SHAPE, "_attn_implementation")],
        (request.adapters, request.batch_size, request.looks_ahead, request.drafter, *request.widths),
    )
    return Path(folder, "hf_speculate", f"costs-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.json")


def _kind(module: nn.Module) -> str:
    """The kind of computation: the module's class, and the backend of packed weights."""
    return f"{type(module).__qualname__} {getattr(getattr(module, 'backend', None), 'name', '')}"


def _read(path: Path) -> RoundCosts | None:
    costs = RoundCosts()
    try:
        content = read_json(path, _MAX_BYTES)
        for timings, (context, size, seconds) in ((getattr(costs, p), each) for p in _PARTS for each in content[p]):
            if not (0 <= context <= _MAX_CONTEXT and 1 <= size <= _MAX_SIZE and 0 <= seconds <= _MAX_SECONDS):
                return None
            for _ in range(_REPEATS):
                timings.record(int(size), float(seconds), int(context))
    except (SpeculateError, OSError, ValueError, TypeError, KeyError):
        return None
    return costs if costs.rounds.knows(1) and costs.plain() > 0 else None


def device_name(device: torch.device) -> str:
    """The manufacturer's name of a device; for a CPU the processor's name."""
    if device.type == "cpu":
        return _processor_name()
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


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
