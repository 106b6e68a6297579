"""Keeps compiled kernels between processes, in a folder that no other user can write.

A file holds a library and a hash. A damaged file (full disk, power cut) is not loaded but compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path


FOLDER_VARIABLE = "HF_SPECULATE_CACHE"

_HASH_BYTES = hashlib.sha256().digest_size


class KernelCache:
    """The folder for kernels: `$HF_SPECULATE_CACHE`, else that of this package in the user's cache.

    Attributes:
        problem: reason why nothing is kept; "" if there is none.
    """

    def __init__(self) -> None:
        own = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "hf_speculate")
        self._folder = Path(os.path.expanduser(os.environ.get(FOLDER_VARIABLE) or own))
        self.problem = ""
        try:
            _make_private(self._folder)
        except OSError as error:
            self._note(error)

    def find(self, name: str) -> Path | None:
        """The path of an undamaged library; None if there is none."""
        path = self._folder / name
        if self.problem or not path.is_file():
            return None
        try:
            content = path.read_bytes()
        except OSError:  # it can be made again
            return None
        return path if content == _with_hash(name, content[:-_HASH_BYTES]) else None

    def keep(self, name: str, library: bytes) -> None:
        """Writes a library, whole or not at all; a failure is noted."""
        if self.problem:
            return
        try:
            descriptor, partial = tempfile.mkstemp(dir=self._folder, prefix=".partial-")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_with_hash(name, library))
                os.replace(partial, self._folder / name)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise
        except OSError as error:
            self._note(error)

    def _note(self, error: OSError) -> None:
        self.problem = (
            f"{self._folder}: {error.strerror or error}; the kernel is not kept, every process compiles it, about a "
            f"minute each. Set {FOLDER_VARIABLE} to an absolute path that only you can write"
        )


def _make_private(folder: Path) -> None:
    """Makes a folder; raises `OSError` if another user can write what is loaded from it."""
    if not folder.is_absolute():  # anybody may have filled the current folder
        raise OSError("it is not an absolute path")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "geteuid"):  # elsewhere the home folder is private
        status = folder.stat()
        if status.st_uid not in (0, os.geteuid()):
            raise OSError(f"it belongs to user {status.st_uid}")
        if status.st_mode & 0o022:
            raise OSError("others can write it (chmod go-w makes it usable)")


def _with_hash(name: str, library: bytes) -> bytes:
    """The content of a file; loaders do not read as far as the hash."""
    return library + hashlib.sha256(name.encode() + b"\0" + library).digest()
