"""The output folder of a run: whether it can be used as asked, and one process at a time in it.

A second process would write over the first one's checkpoints.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from hf_speculate.errors import SpeculateError
from hf_speculate.hub import LOCAL_RECIPE_FILE, RECIPE_FILE, public_recipe, read_provenance

from .checkpoints import last_checkpoint
from .recipe import Recipe


_LOCK_FILE = ".train.lock"
_HOLDER_FILE = ".train.holder"  # a lock file is emptied by whoever tries it
# There while a run runs; a killed one leaves them.
_RUNNING_FILES = (_LOCK_FILE, _HOLDER_FILE)


def checked_folder(folder: str, resume: bool) -> str | None:
    """The checkpoint to resume from.

    Raises:
        SpeculateError: the folder cannot be used as asked.
    """
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


def is_finished(recipe: Recipe) -> bool:
    """Whether the recipe's folder holds the head of a run that ended, with the same section `training`."""
    found = read_provenance(recipe.output.folder) or {}
    before = public_recipe(found.get("recipe") or {}).get("training")
    return found.get("status") == "complete" and before == public_recipe({"training": recipe.training})["training"]


def recipe_file(folder: str | os.PathLike) -> Path:
    """The recipe with which a run in `folder` can be run again."""
    local = Path(folder) / LOCAL_RECIPE_FILE
    return local if local.exists() else Path(folder) / RECIPE_FILE


@contextmanager
def locked(folder: str | os.PathLike) -> Iterator[None]:
    """Holds an output folder, which is made if it is absent; one in which nothing was written is removed again.

    A killed process holds nothing: locks end with whoever had them.

    Raises:
        SpeculateError: another process trains in it.
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
        with suppress(OSError):  # it is not empty, as it should be
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
