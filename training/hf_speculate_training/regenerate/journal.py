"""A JSON-lines file that only grows and survives being killed: nothing lost, nothing doubled."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hf_speculate.errors import SpeculateError


class Journal:
    """An output file of groups of lines; a group is all lines of one example.

    Every line holds `id`, the example's, and `is_last`, whether the group ends with it. What was torn by a kill (an
    unfinished line, an unfinished group) is cut off when the file is opened again. A file beside it (`.settings`)
    holds what it was made with.

    Args:
        path: the output file; its folder is made if it is absent.
        settings: what the output depends on, JSON-serialisable. Reopening it with others raises.

    Raises:
        SpeculateError: made with other settings, being written by another process, not a file of this kind.
    """

    def __init__(self, path: str | os.PathLike, settings: Mapping[str, Any]):
        self.path = Path(path)
        self._settings = json.loads(json.dumps(dict(settings)))
        self._settings_path = self.path.with_name(self.path.name + ".settings")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path.with_name(self.path.name + ".lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise SpeculateError(f"{self.path} is being written by another process.") from error
        try:
            self._check_settings()
            self._cut_torn_end()
            self._file = self.path.open("ab", buffering=0)  # nothing is written later than asked
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lines(self) -> Iterator[dict[str, Any]]:
        """What the file holds."""
        return read_lines(self.path)

    def append(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Writes groups of lines; when it returns they are on the disk.

        Raises:
            SpeculateError: they could not be written; what was there before still is.
        """
        marked = [dict(line, is_last=line is group[-1]) for group in groups for line in group]
        data = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in marked)
        start = self._file.tell()
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
            os.fsync(self._file.fileno())
        except OSError as error:
            os.truncate(self.path, start)
            raise SpeculateError(
                f"cannot write {self.path}: {error}. The {start} bytes before are complete; run the same command again "
                "to go on."
            ) from error

    def close(self) -> None:
        self._file.close()
        self._lock.release()

    def _check_settings(self) -> None:
        if self.path.exists() and self.path.stat().st_size:
            try:
                found = json.loads(self._settings_path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise SpeculateError(
                    f"{self.path} exists, but {self._settings_path.name}, which says what it was made with, cannot be "
                    "read: give another output, or remove the file."
                ) from error
            different = [key for key in {**found, **self._settings} if found.get(key) != self._settings.get(key)]
            if different:
                listed = "; ".join(f"{key} {found.get(key)!r}, now {self._settings.get(key)!r}" for key in different)
                raise SpeculateError(
                    f"{self.path} was made with other settings ({listed}): give another output, or the same settings."
                )
            return
        partial = self._settings_path.with_name(self._settings_path.name + ".partial")
        partial.write_text(json.dumps(self._settings, indent=2) + "\n", encoding="utf-8")
        partial.replace(self._settings_path)

    def _cut_torn_end(self) -> None:
        if not self.path.exists():
            return
        end = position = 0
        with self.path.open("rb") as file:
            for line in file:
                position += len(line)
                if line.endswith(b"\n") and self._ends_group(line):
                    end = position
        if end < position:
            os.truncate(self.path, end)

    def _ends_group(self, line: bytes) -> bool:
        try:
            return bool(json.loads(line)["is_last"])
        except (ValueError, KeyError, TypeError) as error:
            raise SpeculateError(
                f"{self.path} holds a line that was not written by this command: {line[:80]!r}"
            ) from error


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """What a journal's file holds."""
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)
