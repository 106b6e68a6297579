"""The header of a GGUF file, read with every length checked against the size of the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. The `gguf` package
names the types and knows their sizes; its reader is not used, for it makes an array object of every string of a
vocabulary and takes a cut-off file for a short one.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError, SpeculateError


# Value types of the metadata by number: struct format of the fixed-size ones.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        shape: in torch's order, rows first.
        type: name of its ggml type, such as "Q4_K".
        offset: of its first byte in the file.
        row_bytes: bytes of one row (of the last dimension).
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
    """What the header of a file says.

    Attributes:
        metadata: values by key; arrays are lists.
        tensors: entries by name, in the file's order; all of them lie within the file.
        num_bytes: size of the file.
    """

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    num_bytes: int

    def map(self, entry: TensorEntry) -> Tensor:
        """uint8 [rows, row_bytes]: a private mapping of the file; bytes are read when they are looked at."""
        shape = (entry.num_rows, entry.row_bytes)
        return torch.from_numpy(np.memmap(self.path, np.uint8, mode="c", offset=entry.offset, shape=shape))


def read_header(path: str | os.PathLike[str]) -> GgufFile:
    """Reads metadata and the table of tensors; no tensor is touched.

    Raises:
        CheckpointError: not a GGUF file, broken, cut off, or with a tensor of an unknown type.
    """
    path, sizes = os.fspath(path), _type_sizes()
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, data, sizes)
    except (OSError, ValueError) as error:  # not readable, or empty (which cannot be mapped)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot read {path!r} as a GGUF file: {error}") from error


def _type_sizes() -> dict[int, tuple[str, int, int]]:
    """Number of a ggml type -> name, weights a block, bytes a block."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError as error:
        raise SpeculateError(
            "reading GGUF files takes the `gguf` package: pip install 'hf-speculate[gguf]' (or pip install gguf)."
        ) from error
    return {int(kind): (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}


class _Cursor:
    """Reads a file front to back; raises `CheckpointError` instead of leaving it."""

    def __init__(self, path: str, data: mmap.mmap):
        self.path = path
        self.data = data
        self.position = 0

    def broken(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path!r} is broken or cut off at byte {self.position}: {problem}.")

    def skip(self, count: int) -> int:
        """Moves `count` bytes on; the position before."""
        start, left = self.position, len(self.data) - self.position
        if count > left:
            raise self.broken(f"{count} bytes are announced, {left} are left of {len(self.data)}")
        self.position += count
        return start

    def scalar(self, layout: str) -> Any:
        return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))[0]

    def string(self) -> str:
        length = self.scalar("<Q")
        start = self.skip(length)
        try:
            return self.data[start : start + length].decode("utf-8")
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
        start = self.skip(count * struct.calcsize(layout))
        return list(struct.unpack_from(f"<{count}{layout[1]}", self.data, start))

    def _check_count(self, count: int, num_bytes: int) -> None:
        """Before anything of that length is made."""
        if count * num_bytes > len(self.data) - self.position:
            raise self.broken(f"an array of {count} values is announced in a file of {len(self.data)} bytes")


def _read(path: str, data: mmap.mmap, sizes: dict[int, tuple[str, int, int]]) -> GgufFile:
    cursor = _Cursor(path, data)
    if data[:4] != b"GGUF":
        raise CheckpointError(f"{path!r} is no GGUF file: it begins with {data[:4]!r}, not b'GGUF'.")
    cursor.skip(4)
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
    found = [_read_entry(cursor, sizes) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.broken(f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, shape, kind, offset, row_bytes in found:
        entry = TensorEntry(name, shape, kind, start + offset, row_bytes)
        if name in tensors:
            raise CheckpointError(f"{path!r} is broken: tensor {name!r} is there twice.")
        if entry.offset + entry.num_bytes > len(data):
            raise CheckpointError(
                f"{path!r} is cut off: tensor {name!r} ({kind} {list(shape)}) ends at byte "
                f"{entry.offset + entry.num_bytes}, the file at {len(data)}."
            )
        tensors[name] = entry
    return GgufFile(path, metadata, tensors, len(data))


def _read_entry(cursor: _Cursor, sizes: dict[int, tuple[str, int, int]]) -> tuple[str, tuple[int, ...], str, int, int]:
    """Name, shape, type, offset within the data and bytes a row of the next tensor."""
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
