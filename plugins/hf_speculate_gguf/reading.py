"""The header of a GGUF file, read with every length checked against the size of the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. The `gguf` package
gives names and sizes of types. Its reader is not used: it makes an array object of every string of a vocabulary, and
takes a cut-off file for a short one.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO

import torch
from jaxtyping import UInt8
from torch import Tensor

from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import open_regular, user_path


# Device, inode, size and time of the last write.
Identity = tuple[int, int, int, int]

# Struct formats of the metadata's fixed-size value types, by number.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        name: name in the file.
        shape: shape in torch's order, rows first.
        type: name of the ggml type, such as "Q4_K".
        offset: position of the first byte in the file.
        row_bytes: bytes of one row (the last dimension).
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class GgufFile:
    """The header of a file.

    Attributes:
        path: path of the file.
        metadata: values by key; arrays are lists.
        tensors: entries by name, in the file's order. All of them are in this file or one of `others`.
        num_bytes: size of the file.
        identity: inode and time of the last write, to notice a change.
        others: further files of the same model, with some of the tensors.
    """

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    num_bytes: int
    identity: Identity
    others: tuple[GgufFile, ...] = ()

    def read(self, entry: TensorEntry, start: int = 0, stop: int | None = None) -> UInt8[Tensor, "R row_bytes"]:
        """Reads some rows. (A mapping would follow later writes to the file, or crash.)

        Args:
            start, stop: range of rows; None: to the end.
        Raises:
            CheckpointError: the file has changed since its header was read.
        """
        for part in self.others:
            if part.tensors.get(entry.name) is entry:
                return part.read(entry, start, stop)
        stop = entry.num_rows if stop is None else stop
        rows = torch.empty(stop - start, entry.row_bytes, dtype=torch.uint8, device="cpu")
        with open_regular(self.path) as file:
            file.seek(entry.offset + start * entry.row_bytes)
            try:
                # Straight into the tensor: the file object skips its buffer for so many bytes.
                num_read = file.readinto(memoryview(rows.numpy()).cast("B"))  # type: ignore[attr-defined]
            except OSError as error:
                raise CheckpointError(f"cannot read {self.path!r}: {error}") from error
            if num_read != rows.nbytes or file_identity(file) != self.identity:
                raise self._changed()
        return rows

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` if the file was written or replaced since its header was read."""
        with open_regular(self.path) as file:
            if file_identity(file) != self.identity:
                raise self._changed()
        for part in self.others:
            part.check_unchanged()

    def _changed(self) -> CheckpointError:
        return CheckpointError(f"{self.path!r} was written, cut off or replaced while it was read: load it again.")


def read_header(path: str | os.PathLike[str]) -> GgufFile:
    """Reads metadata and the table of tensors; no tensor is touched.

    Raises:
        CheckpointError: it is not a GGUF file, is broken or cut off, or has a tensor of an unknown type.
    """
    path, sizes = user_path(path), _type_sizes()
    with open_regular(path) as file:
        cursor = _Cursor(path, file)
        try:
            return _read(cursor, sizes)
        except OSError as error:
            raise cursor.broken(str(error)) from error


def file_identity(file: BinaryIO) -> Identity:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _type_sizes() -> dict[int, tuple[str, int, int]]:
    """Name, weights per block and bytes per block of each ggml type, by its number."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError as error:
        raise SpeculateError(
            "reading GGUF files takes the `gguf` package: pip install 'hf-speculate[gguf]' (or pip install gguf)."
        ) from error
    return {int(kind): (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}


class _Cursor:
    """Reads a file from front to back; raises `CheckpointError` instead of reading past its end."""

    def __init__(self, path: str, file: BinaryIO):
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self.identity = file_identity(file)
        self.position = 0
        self._file = file

    def broken(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path!r} is broken or cut off at byte {self.position}: {problem}.")

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        left = self.size - self.position
        data = self._file.read(count) if count <= left else b""
        if len(data) != count:
            raise self.broken(f"{count} bytes are announced, {left} are left of {self.size}")
        self.position += count
        return data

    def scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        data = self.take(self.scalar("<Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.broken(f"a string is not UTF-8 ({error.reason})") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        raise self.broken(f"value type {kind} does not exist")

    def array(self) -> list:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _STRING:
            self._check_count(count, 8)
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise self.broken(f"an array of value type {kind}, which is not known")
        layout = _SCALARS[kind]
        self._check_count(count, struct.calcsize(layout))
        return list(struct.unpack(f"<{count}{layout[1]}", self.take(count * struct.calcsize(layout))))

    def _check_count(self, count: int, num_bytes: int) -> None:
        """Checks a length before anything of that length is made."""
        if count * num_bytes > self.size - self.position:
            raise self.broken(f"an array of {count} values is announced in a file of {self.size} bytes")


def _read(cursor: _Cursor, sizes: dict[int, tuple[str, int, int]]) -> GgufFile:
    path, magic = cursor.path, cursor.take(min(4, cursor.size))
    if magic != b"GGUF":
        raise CheckpointError(f"cannot read {path!r}: it is not a GGUF file. It begins with {magic!r}, not b'GGUF'.")
    version = cursor.scalar("<I")
    if version not in _VERSIONS:
        kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise CheckpointError(f"{path!r} is a {kind} GGUF file; versions {_VERSIONS}, little endian, can be read.")
    num_tensors, num_values = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        if key in metadata:
            raise cursor.broken(f"{key!r} is there twice")
        metadata[key] = cursor.value(cursor.scalar("<I"))
    entries = [_read_entry(cursor, sizes) for _ in range(num_tensors)]
    return GgufFile(path, metadata, _placed(cursor, metadata, entries), cursor.size, cursor.identity)


def _placed(
    cursor: _Cursor, metadata: dict[str, Any], entries: list[tuple[str, tuple[int, ...], str, int, int]]
) -> dict[str, TensorEntry]:
    """Entries of the tensors. None leaves the file or shares a byte with another, so together they fit in it."""
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.broken(f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, shape, kind, offset, row_bytes in entries:
        entry = TensorEntry(name, shape, kind, start + offset, row_bytes)
        if name in tensors:
            raise CheckpointError(f"{cursor.path!r} is broken: tensor {name!r} is there twice.")
        if entry.offset + entry.num_bytes > cursor.size:
            raise CheckpointError(
                f"{cursor.path!r} is cut off: tensor {name!r} ({kind} {list(shape)}) ends at byte "
                f"{entry.offset + entry.num_bytes}, the file at {cursor.size}."
            )
        tensors[name] = entry
    for first, second in pairwise(sorted(tensors.values(), key=lambda entry: entry.offset)):
        if first.offset + first.num_bytes > second.offset:
            raise CheckpointError(f"{cursor.path!r} is broken: tensors {first.name!r} and {second.name!r} overlap.")
    return tensors


def _read_entry(cursor: _Cursor, sizes: dict[int, tuple[str, int, int]]) -> tuple[str, tuple[int, ...], str, int, int]:
    """Name, shape, type, offset within the data and bytes per row of the next tensor."""
    name, num_dimensions = cursor.string(), cursor.scalar("<I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise cursor.broken(f"tensor {name!r} has {num_dimensions} dimensions")
    # ggml counts from the dimension that moves fastest, torch from the slowest.
    shape = tuple(cursor.scalar("<Q") for _ in range(num_dimensions))[::-1]
    number, offset = cursor.scalar("<I"), cursor.scalar("<Q")
    if number not in sizes:
        raise CheckpointError(
            f"{cursor.path!r}: tensor {name!r} is of ggml type {number}, which the installed `gguf` does not know."
        )
    kind, block_size, block_bytes = sizes[number]
    if min(shape) < 1 or shape[-1] % block_size:
        raise CheckpointError(
            f"{cursor.path!r}: tensor {name!r} of shape {list(shape)} cannot be made of {kind} blocks of {block_size}."
        )
    return name, shape, kind, offset, shape[-1] // block_size * block_bytes
