"""Runs of the trainer in several processes, on this machine, as `torchrun` starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .paths import REPOSITORY, TESTS


def launch(
    arguments: Sequence[str], processes: int = 2, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """`python -m hf_speculate_training ARGUMENTS` in so many processes; both outputs in one pipe."""
    return _torchrun(["-m", "hf_speculate_training", *arguments], processes, environment, subprocess.STDOUT)


def launched(config: Path, *options: str, processes: int = 2, environment: Mapping[str, str] | None = None) -> str:
    """`train --config` in so many processes; returns what they printed."""
    process = launch(["train", "--config", str(config), *options], processes, environment)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return printed


def run_script(name: str, *arguments: str, processes: int = 2) -> str:
    """A script of `tests/scale` in so many processes; returns what they printed to stdout."""
    process = _torchrun([str(TESTS / "scale" / name), *arguments], processes, None, subprocess.PIPE)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return printed


def _torchrun(
    program: Sequence[str], processes: int, environment: Mapping[str, str] | None, errors: int
) -> subprocess.Popen[str]:
    """One thread each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    return subprocess.Popen(
        [*command, "--master-port", str(port), *program],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=REPOSITORY,
    )
