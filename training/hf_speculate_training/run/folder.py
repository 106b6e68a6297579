"""The output folder of a run, which one process at a time may use, and its checkpoints.

A second process would write over the first one's checkpoints.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import safe_open
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_speculate.errors import SpeculateError
from hf_speculate_plugins.origin import read_provenance
from hf_speculate_tools.hub import LOCAL_RECIPE_FILE, RECIPE_FILE, public_recipe


STATE_FILE = "trainer_state.json"  # the last file of a checkpoint that is written
_FILES = (SAFE_WEIGHTS_NAME, "optimizer.pt", "scheduler.pt")
_LOCK_FILE = ".train.lock"
_HOLDER_FILE = ".train.holder"  # a process that tries a lock file empties it
# Files of a running run; a killed one leaves them.
_RUNNING_FILES = (_LOCK_FILE, _HOLDER_FILE)


def checked_folder(folder: str, resume: bool) -> str | None:
    """The checkpoint from which a run in `folder` resumes; None for a new run. Raises `SpeculateError` if the folder is
    a file, is not empty, or has nothing to resume."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise SpeculateError(f"the output folder {folder} is a file.")
    checkpoint = last_checkpoint(folder) if os.path.isdir(folder) else None
    if resume and checkpoint is None:
        raise SpeculateError(f"nothing to resume: {folder} has no complete checkpoint. Start without --resume.")
    found = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    if not resume and found - set(_RUNNING_FILES):
        hint = f"resume the run in it (--resume, from {Path(checkpoint).name})" if checkpoint else "remove it"
        raise SpeculateError(f"the output folder {folder} is not empty: {hint}, or choose another one.")
    return checkpoint


def is_finished(folder: str, training: Mapping[str, Any]) -> bool:
    """True if `folder` holds the head of a run that ended, with this section `training`."""
    found = read_provenance(folder) or {}
    before = public_recipe(found.get("recipe") or {}).get("training")
    return found.get("status") == "complete" and before == public_recipe({"training": training})["training"]


def recipe_file(folder: str | os.PathLike) -> Path:
    """The recipe that runs the run in `folder` again."""
    local = Path(folder) / LOCAL_RECIPE_FILE
    return local if local.exists() else Path(folder) / RECIPE_FILE


@contextmanager
def locked(folder: str | os.PathLike) -> Iterator[None]:
    """Holds an output folder, or raises `SpeculateError`. An absent one is made, and an empty one removed at the end.

    A lock ends with its process, so a killed one holds nothing.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = _acquired(path)
    except OSError as error:
        raise SpeculateError(f"cannot write to the output folder {folder}: {error}") from error
    try:
        (path / _HOLDER_FILE).write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        for name in _RUNNING_FILES:
            (path / name).unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # as it should be, it is not empty
            path.rmdir()


def refuse_locked(folder: str | os.PathLike) -> None:
    """Raises `SpeculateError` if another process trains in `folder`; changes nothing."""
    path = Path(folder)
    if (path / _LOCK_FILE).exists():
        _acquired(path).release()


def _acquired(path: Path) -> FileLock:
    lock = FileLock(path / _LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        holder = path / _HOLDER_FILE
        who = holder.read_text(encoding="utf-8") if holder.exists() else "another process"
        raise SpeculateError(
            f"{who} is training in the output folder {path}: wait for it, end it, or choose another folder "
            "(output.folder)."
        ) from error
    return lock


def step_of(checkpoint: str | os.PathLike) -> int:
    """The optimizer step of a checkpoint, from its name."""
    return int(Path(checkpoint).name.rpartition("-")[2])


def last_checkpoint(folder: str | os.PathLike | None) -> str | None:
    """The newest complete checkpoint in `folder`; None for none. A killed run may have left an incomplete one."""
    root = Path(folder or ".")
    found = [path for path in root.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
    for path in sorted(found, key=step_of, reverse=True):
        if _is_complete(path):
            return str(path)
    return None


def checkpoints_note(folder: str | os.PathLike) -> str:
    """A line about the checkpoints that a finished run leaves; empty if there are none."""
    found = sorted(Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    if not found:
        return ""
    size = sum(file.stat().st_size for path in found for file in path.rglob("*") if file.is_file())
    pattern = Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-*"
    return f"{pattern} ({size / 1e6:.0f} MB) is needed only to train on, by --resume with more steps. Else delete it."


def _is_complete(checkpoint: Path) -> bool:
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    has_files = all((checkpoint / name).is_file() for name in _FILES)
    return has_files and state.get("global_step") == step_of(checkpoint)


def check_checkpoint(checkpoint: str, method: nn.Module) -> None:
    """Raises `SpeculateError` unless the checkpoint holds exactly the tensors of `method`."""
    path = os.path.join(checkpoint, SAFE_WEIGHTS_NAME)
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, RuntimeError, ValueError) as error:
        raise SpeculateError(
            f"cannot resume from {checkpoint}: {SAFE_WEIGHTS_NAME} cannot be read ({error})."
        ) from error
    wanted = {name: tuple(tensor.shape) for name, tensor in method.state_dict().items()}
    different = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if different:
        name = different[0]
        raise SpeculateError(
            f"cannot resume from {checkpoint}: it holds another head. {len(different)} tensors differ, e.g. {name}: "
            f"{found.get(name, 'absent')} there, {wanted.get(name, 'absent')} in this one. Resume with the recipe that "
            "the run was started with, or start a new run in another folder."
        )
