"""A JSON-lines file that only grows and survives being killed: nothing lost, nothing doubled."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import json_writer, read_json, replace_files, user_path


class Journal:
    """An output file of groups of lines; a group is all lines of one example.

    Every line holds the example's `id`, and `is_last`, which marks the end of its group. Opening the file again cuts
    off a line or a group that a kill left unfinished. A file next to it (`.settings`) holds everything that the output
    depends on, JSON-serialisable. The folder is made if it is absent.

    Raises:
        SpeculateError: made with other settings, being written by another process, not a file of this kind; it cannot
            be written (a full disk, no rights, no such place).
    """

    def __init__(self, path: str | os.PathLike, settings: Mapping[str, Any]):
        self.path = Path(user_path(path))
        self._settings = json.loads(json.dumps(dict(settings)))
        self._settings_path = self.path.with_name(self.path.name + ".settings")
        self._lock = FileLock(self.path.with_name(self.path.name + ".lock"))
        try:
            self._check_place()
            self._lock.acquire(timeout=0)
            self._check_settings()
            self._cut_torn_end()
            self._file = self.path.open("ab", buffering=0)  # every write is at once
        except Timeout as error:
            raise SpeculateError(f"{self.path} is being written by another process.") from error
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError):
                raise SpeculateError(f"cannot write {self.path}: {error}. Nothing was changed.") from error
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Writes groups of lines to the disk; raises `SpeculateError` and leaves the file as before if that fails."""
        marked = [dict(line, is_last=line is group[-1]) for group in groups for line in group]
        data = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in marked)
        start = self._file.tell()
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:])
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):  # else the next run cuts what is torn
                os.truncate(self.path, start)
            raise SpeculateError(
                f"cannot write {self.path}: {error}. The {start} bytes before are complete; run the same command again "
                "to resume."
            ) from error

    def close(self) -> None:
        self._file.close()
        self._lock.release()

    def _check_place(self) -> None:
        """Raises before any file is made next to a device or a folder."""
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise SpeculateError(
                    f"cannot write {self.path}: it is a folder, a pipe or a device, not a regular file."
                )
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def _check_settings(self) -> None:
        if not (self.path.exists() and self.path.stat().st_size):
            replace_files(self.path.parent, {self._settings_path.name: json_writer(self._settings)})
            return
        try:
            found = read_json(self._settings_path)
        except CheckpointError as error:
            raise SpeculateError(
                f"{self.path} exists, but {self._settings_path.name}, which holds its settings, cannot be "
                f"read: give another output, or remove the file. ({error})"
            ) from error
        different = [key for key in {**found, **self._settings} if found.get(key) != self._settings.get(key)]
        if different:
            listed = "; ".join(f"{key} {found.get(key)!r}, now {self._settings.get(key)!r}" for key in different)
            raise SpeculateError(
                f"{self.path} was made with other settings ({listed}): give another output, or the same settings."
            )

    def _cut_torn_end(self) -> None:
        if not self.path.exists():
            return
        end = position = 0
        seen: set[tuple[str, int]] = set()
        with self.path.open("rb") as file:
            for data in file:
                position += len(data)
                if data.endswith(b"\n"):
                    line = self._line(data)
                    if (line.id, line.part) in seen:
                        raise SpeculateError(f"{self.path} holds number {line.id} twice: remove one of its lines.")
                    seen.add((line.id, line.part))
                    end = position if line.is_last else end
        if end < position:
            os.truncate(self.path, end)

    def _line(self, data: bytes) -> _Line:
        try:
            return _Line.model_validate_json(data)
        except ValidationError as error:
            raise SpeculateError(
                f"{self.path} holds a line that was not written by this command: {data[:80]!r}"
            ) from error


class _Line(BaseModel):
    """Fields of a line that give its place."""

    model_config = ConfigDict(strict=True)

    id: str
    part: int
    is_last: bool
    input_ids: list[int]
    num_prompt_tokens: int


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a journal's file."""
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)
