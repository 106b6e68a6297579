"""Imports test modules of transformers from an unpacked source distribution (TRANSFORMERS_SDIST), by path.

The distribution lacks modules that those import. Where a file is missing, a stand-in of ours takes its place: empty
mixins, and `run_distributed`, which forks its ranks (so that what is patched here is patched there).
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any


PACKAGE = "transformers_sdist_tests"
RANK_SECONDS = 120

at_end_of_rank: list[Callable[[], None]] = []
"""Called in every rank before it ends: what it counted would be lost with it."""


def folder() -> Path:
    return Path(os.environ["TRANSFORMERS_SDIST"]) / "tests"


def load(name: str) -> ModuleType:
    """The module `tests/<name>.py` of the distribution."""
    if PACKAGE not in sys.modules:
        _add_package(PACKAGE, folder())
        _stand_in("generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
        _stand_in("exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
        _stand_in("distributed_testing_utils", run_distributed=run_distributed)
    return importlib.import_module(f"{PACKAGE}.{name}")


def is_there(name: str) -> bool:
    return (folder() / f"{name.replace('.', '/')}.py").exists()


def _add_package(name: str, path: Path) -> None:
    package = ModuleType(name)
    package.__path__ = [str(path)]
    sys.modules[name] = package


def _stand_in(name: str, **contents: Any) -> None:
    if is_there(name):
        return
    parent = name.rpartition(".")[0]
    if parent:
        _add_package(f"{PACKAGE}.{parent}", folder() / parent)
    module = ModuleType(f"{PACKAGE}.{name}")
    vars(module).update(contents)
    sys.modules[module.__name__] = module


def run_distributed(world_size: int) -> Callable:
    """`run_distributed(2)(function)(*arguments)` calls `function(rank, *arguments)` in two processes of one group."""

    def decorate(function: Callable) -> Callable:
        def run(*arguments: Any) -> None:
            with tempfile.TemporaryDirectory() as meeting_point:
                ranks = [_fork(function, rank, world_size, meeting_point, arguments) for rank in range(world_size)]
                failed = [rank for rank, process in enumerate(ranks) if _wait(process)]
                problems = [Path(meeting_point, f"error-{rank}").read_text() for rank in failed]
            assert not failed, f"ranks {failed} failed:\n" + "\n".join(problems)

        return run

    return decorate


def _fork(function: Callable, rank: int, world_size: int, meeting_point: str, arguments: tuple[Any, ...]) -> int:
    error = Path(meeting_point, f"error-{rank}")
    error.write_text("no answer in time, or killed")
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        _run_rank(function, rank, world_size, meeting_point, arguments)
        status = 0
    except BaseException:
        error.write_text(traceback.format_exc())
    finally:
        os._exit(status)  # pytest must not go on in the child


def _run_rank(function: Callable, rank: int, world_size: int, meeting_point: str, arguments: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting_point}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=RANK_SECONDS),
    )
    try:
        function(rank, *arguments)
    finally:
        for finish in at_end_of_rank:
            finish()
    dist.destroy_process_group()


def _wait(process: int) -> int:
    """0 if the process ended well. One that hangs is ended."""
    deadline = time.monotonic() + RANK_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return status
        time.sleep(0.05)
    os.kill(process, 9)
    return os.waitpid(process, 0)[1] or 1
