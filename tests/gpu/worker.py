"""The process that runs the phases of the report, one after the other. `report` starts it, and starts it again if it
dies or hangs.

    python -m tests.gpu.worker '{"phases": [["env", 1234.5, 5.0]], "device": "cuda", "tiny": false, "lines": 5}'
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from .setting import Setting, describe, free_memory, trace
from .supervisor import latest


MODULES = {
    "env": "environment",
    "tests": "suite",
    "attention": "attention",
    "rounds": "rounds",
    "text": "text",
    "speed": "speed",
    "training": "training",
}
BROKEN = 17
"""Exit status after an error of the device: nothing works in this process any more."""


def run_phases(
    phases: list[tuple[str, float, float]], device: torch.device, is_tiny: bool, lines: int, ways: Sequence[str]
) -> int:
    """Runs phases and writes findings. Returns the exit status.

    Args:
        phases: name of each phase, its planned end in seconds of `time.monotonic`, and the seconds that it has at
            least.
        device: device to measure.
        is_tiny: whether sizes are tiny.
        lines: file descriptor for findings, one line of JSON each.
        ways: names of `MODES` to measure.
    """
    with os.fdopen(lines, "w", buffering=1) as file:

        def write(finding: dict[str, Any]) -> None:
            file.write(json.dumps(finding) + "\n")

        for name, planned, least in phases:
            setting = Setting(name, device, is_tiny, latest(planned, least), write, ways)
            start = time.monotonic()
            setting.report(begun=True, seconds_given=setting.left)
            status = run_phase(setting)
            setting.report(done=True, seconds=time.monotonic() - start)
            if status:
                return status
    return 0


def run_phase(setting: Setting) -> int:
    """Runs one phase; its error becomes a finding. Returns 0, or `BROKEN` after an error of the device."""
    try:
        importlib.import_module(f".{MODULES[setting.phase]}", __package__).measure(setting)
    except Exception as error:
        setting.report(error=describe(error), trace=trace(error))
    try:
        free_memory(setting.device)
        torch.zeros(1, device=setting.device).item()
    except (AssertionError, RuntimeError) as error:
        setting.report(error=f"the device is lost for this process: {describe(error)}", device_lost=True)
        return BROKEN
    return 0


def main() -> None:
    """Runs the request in the only argument, which is JSON."""
    request = json.loads(sys.argv[1])
    logging.getLogger("hf_speculate").setLevel(logging.DEBUG)  # for the tracebacks of what could not be recorded
    device, ways = torch.device(request["device"]), request["ways"]
    if device.type == "cpu":
        torch.set_num_threads(1 if request["tiny"] else torch.get_num_threads())
    if "warm" in request:
        from . import speed

        setting = Setting("warm", device, request["tiny"], time.monotonic() + 600, lambda finding: None, ways)
        speed.warm(setting, request["warm"])
        return
    raise SystemExit(run_phases(request["phases"], device, request["tiny"], request["lines"], ways))


if __name__ == "__main__":
    main()
