"""Files of unknown origin, read within bounds."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError


# The largest JSON file of a head or a target is an index, of a few megabytes.
MAX_JSON_BYTES = 64 << 20
MAX_JSON_DEPTH = 64
# Digits of an integer that may be parsed; its value is checked where it is used.
_MAX_DIGITS = 40

# Escape of half a character in JSON.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_KINDS = {dict: "an object", str: "a text", int: "an integer", list: "a list"}

# Beginning of the file that Git-LFS leaves in the place of a large one.
_POINTER = b"version https://git-lfs.github.com/spec/"


def user_path(path: str | os.PathLike[str]) -> str:
    """A path that a person gave, with the home folder for "~".

    Shells expand "~" only at the beginning of a word: `--out=~/x` and `draft_model:model=~/x` reach us as they are.
    """
    return os.path.expanduser(os.fspath(path))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading.

    Raises:
        CheckpointError: the file is absent or unreadable, no regular file (a pipe would wait for its writer for ever),
            or the pointer that Git-LFS leaves in the place of a file that was not fetched.
    """
    try:
        # Without O_NONBLOCK even the opening of a pipe waits.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise CheckpointError(f"cannot read {shown_path(path)}: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(
            f"cannot read {shown_path(path)}: it is a folder, a pipe or a device, not a regular file."
        )
    if os.read(descriptor, len(_POINTER)) == _POINTER:
        os.close(descriptor)
        raise CheckpointError(
            f"{shown_path(path)} is a pointer of Git-LFS, not the file: run `git lfs install` and `git lfs pull` in "
            "its repository, or fetch it with `hf download`."
        )
    os.lseek(descriptor, 0, os.SEEK_SET)
    return open(descriptor, "rb")


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises the errors of `open_regular`, for a file that other code opens by name."""
    open_regular(path).close()


def own_file(folder: str | os.PathLike[str], name: str) -> Path | None:
    """The real path of a regular file directly in `folder`; None if there is no such file.

    Links are not followed, because the file that one points to does not belong to the folder. The exception is a
    snapshot in the Hub's cache: its links lead to blobs of the same repository.

    Args:
        folder: a folder, which may itself be reached by a link.
        name: path below the folder, with "/" between its parts.

    Raises:
        CheckpointError: the name leaves the folder, or names a link, a folder, a pipe or a device.
    """
    root = Path(os.path.realpath(folder))
    path = root
    for part in name.split("/"):
        path = path / part
        if part in ("", ".", "..") or os.path.basename(part) != part:
            raise CheckpointError(f"{name!r} is not the name of a file in {shown_path(folder)}.")
        if path.is_symlink() and not _is_cached(root, path):
            raise CheckpointError(
                f"{path} is a link to {os.readlink(path)}, and links are not followed here: put a copy of the file in "
                "its place."
            )
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise CheckpointError(f"{path} is a folder, a pipe or a device, not a regular file.")
    return Path(os.path.realpath(path))


def _is_cached(root: Path, link: Path) -> bool:
    """Whether a link in a snapshot of the Hub's cache leads to a blob of the same repository."""
    blobs = Path(os.path.realpath(link)).parent
    return blobs.name == "blobs" and root.is_relative_to(blobs.parent / "snapshots")


def file_names(folder: str | os.PathLike[str]) -> list[str]:
    """Sorted names in a folder, empty without one; raises `CheckpointError` if the folder cannot be read."""
    try:
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    except OSError as error:
        raise CheckpointError(f"cannot read the folder {shown_path(folder)}: {error}") from error


def listed(names: Sequence[str], limit: int = 12) -> str:
    """The first of many names, for messages."""
    more = len(names) - limit
    return ", ".join(map(cut, names[:limit])) + (f" and {more} more" if more > 0 else "")


def cut(text: str) -> str:
    """A text of at most 200 characters: the beginning of a longer one."""
    return text if len(text) <= 200 else f"{text[:100]} ... ({len(text)} characters)"


def folder_state(folder: str) -> tuple[tuple[str, int, int, int], ...]:
    """Name, inode, size and time of change of every file in a folder, or of the file that it is, links followed.

    Empty if there is nothing of that name.

    Two states differ if a file was written, replaced, added or removed between them.
    """
    try:
        if os.path.isdir(folder):
            with os.scandir(folder) as entries:
                found = [(entry.name, entry.stat()) for entry in entries]
        else:
            found = [("", os.stat(folder))]
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return ()
    return tuple(sorted((name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in found))


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file.

    Raises:
        CheckpointError: see `open_regular`; or the file has more than `limit` bytes, of which none is read then.
    """
    with open_regular(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = file.read(limit + 1) if size <= limit else b""
        except (OSError, MemoryError) as error:
            raise CheckpointError(
                f"cannot read {shown_path(path)}: {error or 'it does not fit into memory'}"
            ) from error
    if max(size, len(data)) > limit:  # it may have grown, or not know its size
        raise CheckpointError(f"cannot read {shown_path(path)}: it has more than {limit >> 20} MB.")
    return data


def read_json(path: str | os.PathLike[str], limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file. All JSON files of heads, stores and caches are read here.

    Args:
        limit: largest size in bytes.
    Raises:
        CheckpointError: the file is not a regular one, is larger than `limit` or is not JSON; it is nested deeper than
            64 levels, holds an integer of more than 40 digits or text that is not Unicode, or is not an object.
    """
    data = read_bytes(path, limit)
    try:
        content = json.loads(data.decode("utf-8"), parse_int=_integer)
        if _SURROGATE.search(data):
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError, MemoryError) as error:  # ValueError: bytes, text or digits
        why = {RecursionError: "it is nested too deeply", MemoryError: "it does not fit into memory"}
        raise CheckpointError(f"cannot read {shown_path(path)}: {why.get(type(error), error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{shown_path(path)} holds a {type(content).__name__}, expected an object.")
    _check_depth(path, content)
    return content


def check_kinds(path: str | os.PathLike[str], content: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Checks the types of the values that will be used.

    Args:
        path: file of the values, for the message.
        content: the object in the file.
        kinds: `section.key` -> type, or a union of types. Absent and null values pass.
    Raises:
        CheckpointError: a value has another type, or a number is not finite.
    """
    for place, kind in kinds.items():
        value: Any = content
        for key in place.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        is_number = isinstance(value, int | float)
        if value is None or (isinstance(value, kind) and not (is_number and not _is_number(value))):
            continue
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:60]} ..."
        raise CheckpointError(f"{shown_path(path)}: {place} is {shown}, expected {_KINDS.get(kind, kind)}.")


def section(content: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """A nested object; empty if there is none."""
    for name in names:
        found = content.get(name)
        content = found if isinstance(found, Mapping) else {}
    return content


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _is_number(value: int | float) -> bool:
    return not isinstance(value, bool) and math.isfinite(value)


def _check_depth(path: str | os.PathLike[str], content: Any) -> None:
    """Raises for deep nesting: the parser's own limit is too deep for code that copies, compares or writes values."""
    level = [content]
    for _ in range(MAX_JSON_DEPTH):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise CheckpointError(f"cannot read {shown_path(path)}: it is nested deeper than {MAX_JSON_DEPTH} levels.")


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as messages show it: quoted if it holds a zero byte."""
    return repr(os.fspath(path)) if "\0" in os.fspath(path) else os.fspath(path)
