"""Files that others read, written whole or not at all.

New files are written to a scratch folder next to the old ones, which they replace when all of them are on the disk.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .reading import shown_path


# Function that writes one file at a path, which no other process knows yet.
Writer = Callable[[str], Any]

# Folder in a scratch folder for the files that are being replaced.
_OLD = ".old"


class _NotPutBackError(CheckpointError):
    """Old files that are in the scratch folder only."""


def json_writer(value: Mapping[str, Any], indent: int | None = 2) -> Writer:
    """A writer of an object as JSON, for `replace_files`; without `indent` it writes one line."""
    return text_writer(json.dumps(value, indent=indent) + "\n")


def text_writer(text: str) -> Writer:
    """A writer of text in UTF-8, for `replace_files`."""
    return lambda path: Path(path).write_bytes(text.encode("utf-8"))


def replace_files(folder: str | os.PathLike[str], files: Mapping[str, Writer], stale: Sequence[str] = ()) -> None:
    """Writes files into `folder`, which is made; see `replacing`. The last file describes the others.

    Args:
        files: writers by name.
        stale: names of files to remove when the new ones arrive.
    Raises:
        CheckpointError: the files could not be written (a full disk, no rights). Everything is as it was.
    """
    with replacing(folder, list(files)[-1]) as new:
        new.stale.extend(stale)
        try:
            for name, write in files.items():
                write(str(new.scratch / name))
        # For a full disk torch and safetensors raise other errors than OSError, which differ between versions.
        except Exception as error:
            raise _not_written(folder, f"{', '.join(files)} to ", error) from error


@dataclass(frozen=True)
class NewFiles:
    """Files on their way into a folder.

    Attributes:
        scratch: folder to write them to.
        stale: names of files to remove from the folder when the new ones arrive.
    """

    scratch: Path
    stale: list[str] = field(default_factory=list)


@contextmanager
def replacing(folder: str | os.PathLike[str], last: str) -> Iterator[NewFiles]:
    """A scratch folder whose files, at the end of the block, replace those of the same names in `folder`.

    All of them are on the disk before the first takes its name. An error in the block, an interruption or a full disk
    leaves `folder` as it was. Old files are never written to, so they may be mapped into memory, or links.

    The file `last` describes the others. If it changes, or several others do, the old one is put aside before any other
    is replaced. So a process that is killed in between leaves no description, and never one of another save. The old
    files are then below the scratch folder.

    Args:
        folder: folder to write, made if it is absent.
        last: name of the file that takes its name last.
    Raises:
        CheckpointError: the files could not be written (a full disk, no rights). Everything is as it was.
    """
    where = Path(folder)
    was_absent = not where.exists()
    new = NewFiles(where / f".{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with _reported(folder):
            new.scratch.mkdir(parents=True)
        yield new
        with _reported(folder):
            names = _written(new.scratch)
        if names:
            _publish(where, new, sorted(names, key=lambda name: name == last))
    except _NotPutBackError:
        raise
    except BaseException:
        shutil.rmtree(new.scratch, ignore_errors=True)
        if was_absent:
            with suppress(OSError):
                where.rmdir()
        raise
    shutil.rmtree(new.scratch, ignore_errors=True)


def _not_written(folder: str | os.PathLike[str], what: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"cannot write {what}{shown_path(folder)}: {error}. Nothing that was there before is lost.")


@contextmanager
def _reported(folder: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise _not_written(folder, "to ", error) from error


def _written(scratch: Path) -> list[str]:
    """Sorted names of all new files, now on the disk, and as readable as the user's other files."""
    names = sorted(path.relative_to(scratch).as_posix() for path in scratch.rglob("*") if not path.is_dir())
    probe = scratch / _OLD
    probe.touch()
    mode = probe.stat().st_mode  # as the user's umask has it; safetensors makes files private
    probe.unlink()
    for name in names:
        (scratch / name).chmod(mode)
        _flush(scratch / name)
    return names


def _publish(folder: Path, new: NewFiles, names: Sequence[str]) -> None:
    """Gives files their names, the last one last. If that fails, the old ones come back.

    Nothing is written any more, so only rights or the disk itself can fail.
    """
    scratch, last = new.scratch, names[-1]
    first = [name for name in new.stale if name not in names and os.path.lexists(folder / name)]
    others = [*first, *names[:-1]]
    if others and (folder / last).is_file() and (len(others) > 1 or not _is_same(folder / last, scratch / last)):
        first.append(last)
    try:
        for name in first:
            os.replace(folder / name, _made(scratch / _OLD / name))
        if first:
            _flush_folder(folder)
        for name in names:
            _keep_old(folder / name, scratch / _OLD / name)
            os.replace(scratch / name, _made(folder / name))
    except BaseException as error:  # also an interruption
        _put_back(folder, scratch, first, names)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"cannot replace {', '.join(names)} in {shown_path(folder)}: {error}; nothing is lost."
        ) from error
    _flush_folder(folder)


def _keep_old(path: Path, aside: Path) -> None:
    """Gives an old file a second name, so that it can come back. It keeps the first one until a new file takes it."""
    if not os.path.lexists(path):
        return
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(f"{path} is a folder")
    try:
        os.link(path, _made(aside), follow_symlinks=False)
    except (OSError, NotImplementedError):  # not every disk has links
        os.replace(path, aside)


def _put_back(folder: Path, scratch: Path, first: Iterable[str], names: Sequence[str]) -> None:
    """Undoes what was done of a replacement, going by what lies where."""
    for name in dict.fromkeys([*(name for name in first if name not in names), *names]):
        path, old = folder / name, scratch / _OLD / name
        try:
            if os.path.lexists(old):
                if not (os.path.lexists(path) and os.path.samestat(path.lstat(), old.lstat())):
                    os.replace(old, path)
            elif name in names and not os.path.lexists(scratch / name):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise _NotPutBackError(
                f"cannot put {name} back into {shown_path(folder)}: {error}; the old files are in {old.parent}."
            ) from error


def _made(path: Path) -> Path:
    """The path, with a folder to be in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _is_same(old: Path, new: Path) -> bool:
    return old.stat().st_size == new.stat().st_size and old.read_bytes() == new.read_bytes()


def _flush(path: Path) -> None:
    """Brings a file to the disk: only then a renamed file is whole after a crash."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system can flush a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
