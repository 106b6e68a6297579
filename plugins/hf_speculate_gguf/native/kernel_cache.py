"""Keeps compiled kernels between processes and loads them, but none that another user could have written.

A folder is used only if its path is absolute, it belongs to the user or root, and no other user can write it. The same
holds for a file. Ownership is checked on open descriptors, as a path could be replaced in between. A file holds its
library and a hash. A damaged file (full disk, power cut) is not loaded but compiled again. The verified bytes
themselves are loaded from memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


# A folder that users share on purpose, for example filled by root. It is read before the user's own.
SHARED_VARIABLE = "HF_SPECULATE_CACHE"

# Mark after the library, before its hash; loaders do not read that far.
_MARK = b"\nhf_speculate kernel, sha256 "
_MAX_BYTES = 1 << 26
# Age at which unfinished files and folders count as left over from a killed process.
LEFTOVER_SECONDS = 24 * 3600
_TEMPORARY = "hf_speculate-kernel-"  # prefix of the folders in which compilers run

_HAS_OWNERS = hasattr(os, "geteuid") and {os.open, os.mkdir, os.unlink} <= os.supports_dir_fd


@dataclass(frozen=True)
class _Place:
    """A folder for kernels, and who may read what is written there."""

    path: str
    is_shared: bool

    @property
    def folder_mode(self) -> int:
        return 0o755 if self.is_shared else 0o700

    @property
    def file_mode(self) -> int:
        return 0o644 if self.is_shared else 0o600


class KernelCache:
    """The folders for kernels: `$HF_SPECULATE_CACHE` if it is set, and the user's own cache.

    Nothing here raises: what cannot be used is skipped and noted.

    Attributes:
        problems: descriptions of unusable folders and files, for one warning.
    """

    def __init__(self) -> None:
        self._noted: dict[str, str] = {}
        self._places = list(self._find_places()) if _HAS_OWNERS else []
        if not _HAS_OWNERS:
            self._noted["system"] = "this system does not record who has written a file"

    @property
    def problems(self) -> list[str]:
        return list(self._noted.values())

    def read(self, name: str) -> bytes | None:
        """The verified library of this name; None if there is none. A library found only in the user's cache is copied
        to the shared folder."""
        for number, place in enumerate(self._places):
            with self._noting(place.path), _opened(place) as folder, self._noting(f"{place.path}/{name}"):
                _remove_leftovers(folder)
                library = _read(folder, name)
                for earlier in self._places[:number]:
                    with contextlib.suppress(OSError):  # most users may not write there
                        _keep(earlier, name, library)
                return library
        return None

    def names(self, prefix: str) -> list[str]:
        """Names that begin with `prefix`, the newest of each folder first."""
        found: dict[str, None] = {}
        for place in self._places:
            with self._noting(place.path), _opened(place) as folder:
                names = [name for name in os.listdir(folder) if name.startswith(prefix)]
                times = {name: os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns for name in names}
                found |= dict.fromkeys(sorted(names, key=times.__getitem__, reverse=True))
        return list(found)

    def keep(self, name: str, library: bytes) -> bool:
        """Writes a library to the first folder that accepts it, whole or not at all; returns whether one did."""
        failures = []
        for place in self._places:
            try:
                _keep(place, name, library)
                return True
            except OSError as error:
                if place.path not in self._noted:
                    failures.append(f"{place.path}: {_reason(error)}")
        self._noted["keep"] = "; ".join((*failures, "the kernel is not kept, and every process compiles it"))
        return False

    @contextlib.contextmanager
    def _noting(self, where: str) -> Iterator[None]:
        """A context that ignores missing files and notes what cannot be used."""
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError as error:
            self._noted[where] = f"{where}: {_reason(error)}"

    def _find_places(self) -> Iterator[_Place]:
        shared, own = os.environ.get(SHARED_VARIABLE), os.environ.get("XDG_CACHE_HOME")
        if shared:
            yield from self._place(f"${SHARED_VARIABLE}", os.path.expanduser(shared), is_shared=True)
        if own and (places := list(self._place("$XDG_CACHE_HOME", own, is_shared=False))):
            yield from places
            return
        home = os.path.expanduser("~/.cache")
        if os.path.isabs(home) or not shared:  # a shared folder is meant for users without a home
            yield from self._place("the home folder's cache", home, is_shared=False)

    def _place(self, source: str, path: str, is_shared: bool) -> Iterator[_Place]:
        if os.path.isabs(path):
            yield _Place(path if is_shared else os.path.join(path, "hf_speculate"), is_shared)
        else:  # a relative path depends on the current folder, which anybody may have filled
            self._noted[source] = f"{source} is {path!r}, not an absolute path, and is not used"


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder to compile in. Folders that this user's killed processes left over a day ago are removed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*") if _HAS_OWNERS else ():
        with contextlib.suppress(OSError):  # gone meanwhile
            status = folder.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(folder)  # which refuses links
    return tempfile.TemporaryDirectory(prefix=_TEMPORARY)


def load(library: bytes) -> ctypes.CDLL:
    """Loads a library from memory, so that no file can change or shrink underneath.

    Raises:
        OSError: the bytes are not a library, are for another machine, or are cut off.
    """
    _check_whole(library)
    with contextlib.suppress(OSError, AttributeError):  # not Linux, no /proc, or forbidden: use a copy
        return _load_from_memory(library)
    with tempfile.TemporaryDirectory(prefix="hf_speculate-", ignore_cleanup_errors=True) as private:
        path = Path(private) / "kernel.so"
        path.write_bytes(library)
        return ctypes.CDLL(str(path))


def _check_whole(library: bytes) -> None:
    """Raises `OSError` for an ELF file that is shorter than its headers state.

    The loader would map pages after the end, and the first access to them kills the process.
    """
    if library[:5] != b"\x7fELF\x02":  # 64 bits; there is no kernel for others
        return
    size, order = len(library), "<" if library[5:6] == b"\x01" else ">"
    try:
        programs, sections = struct.unpack_from(f"{order}QQ", library, 32)
        program_size, num_programs, section_size, num_sections = struct.unpack_from(f"{order}4H", library, 54)
        end = sections + section_size * num_sections
        for number in range(num_programs):
            offset, _, _, length = struct.unpack_from(f"{order}4Q", library, programs + number * program_size + 8)
            end = max(end, offset + length)
    except struct.error:
        end = size + 1
    if end > size:
        raise OSError(f"it is cut off: of at least {end} bytes there are {size}")


def _load_from_memory(library: bytes) -> ctypes.CDLL:
    import fcntl

    descriptor = os.memfd_create("hf_speculate-kernel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(library)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        # The descriptor stays open: the loader knows libraries by name, and a closed number would be reused.
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except BaseException:
        os.close(descriptor)
        raise


@contextlib.contextmanager
def _opened(place: _Place, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder; raises `OSError` if it cannot be trusted."""
    is_new = make and _make_folder(place)
    folder = os.open(place.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_trusted(os.fstat(folder), "the folder")
        if is_new and place.is_shared and not os.listdir(folder):
            os.fchmod(folder, place.folder_mode)  # readable as intended under any umask
        yield folder
    finally:
        os.close(folder)


def _make_folder(place: _Place) -> bool:
    """Makes the folder; returns whether it was missing."""
    os.makedirs(os.path.dirname(place.path), mode=place.folder_mode, exist_ok=True)
    try:
        os.mkdir(place.path, place.folder_mode)
    except FileExistsError:
        return False
    return True


def _check_trusted(status: os.stat_result, what: str) -> None:
    if status.st_uid not in _trusted_owners():
        raise PermissionError(f"{what} belongs to user {status.st_uid}, not to you or root, and is not used")
    if mode := status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "everybody" if mode & stat.S_IWOTH else "a group"
        raise PermissionError(f"{what} can be written by {who}, and is not used (chmod go-w makes it usable)")


def _trusted_owners() -> tuple[int, ...]:
    return (0, os.geteuid())


def _keep(place: _Place, name: str, library: bytes) -> None:
    with _opened(place, make=True) as folder:
        _write(folder, name, _sealed(name, library), place.file_mode)


def _remove_leftovers(folder: int) -> None:
    """Removes files that killed processes began to write more than a day ago."""
    for name in os.listdir(folder):
        if name.startswith(".native-"):
            with contextlib.suppress(OSError):  # already removed, or owned by another user
                if time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > LEFTOVER_SECONDS:
                    os.unlink(name, dir_fd=folder)


def _read(folder: int, name: str) -> bytes:
    # Do not follow links, and do not wait for pipes.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a file, and is not used")
        _check_trusted(status, "the file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(_MAX_BYTES)
    finally:
        os.close(descriptor)
    library = content[: -len(_seal(name, b""))]
    if _sealed(name, library) != content:
        raise OSError("it is damaged, and is not used")
    return library


def _write(folder: int, name: str, content: bytes, mode: int) -> None:
    partial = f".{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())  # the name must reach the disk after the content
        os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial, dir_fd=folder)
        raise
    with contextlib.suppress(OSError):  # some file systems cannot do this for folders
        os.fsync(folder)


def _sealed(name: str, library: bytes) -> bytes:
    return library + _seal(name, library)


def _seal(name: str, library: bytes) -> bytes:
    return _MARK + hashlib.sha256(name.encode() + b"\0" + library).hexdigest().encode()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
