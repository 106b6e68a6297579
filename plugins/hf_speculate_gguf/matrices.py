"""Matrices as the packers see them: rows of one or more tensors of a file, in the order of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from hf_speculate.errors import CheckpointError

from .native import DENSE_TYPES, FORMATS, dense_values
from .reading import GgufFile, TensorEntry


_CHUNK = 1 << 22  # weights that are dequantised at a time, in float32


@dataclass(frozen=True)
class TensorRows:
    """The rows of one tensor.

    Attributes:
        order: int64 [rows], row of the file for each row; None if they are in order.
    """

    file: GgufFile
    entry: TensorEntry
    order: Int64[Tensor, " N"] | None = None

    def read(self, start: int, stop: int) -> UInt8[Tensor, "R bytes"]:
        if self.order is None:
            return self.file.read(self.entry, start, stop)
        wanted = self.order[start:stop]  # mostly rows of a head or two, so little more is read than needed
        first = int(wanted.min())
        return self.file.read(self.entry, first, int(wanted.max()) + 1)[wanted - first]


@dataclass(frozen=True)
class Matrix:
    """Tensors of one type and width, one below the other: `y = x @ matrix.T` computes all their products at once."""

    parts: tuple[TensorRows, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.entry.name for part in self.parts)

    @property
    def type(self) -> str:
        return self.parts[0].entry.type

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each part."""
        return tuple(part.entry.num_rows for part in self.parts)

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    @property
    def num_columns(self) -> int:
        return self.parts[0].entry.shape[-1]

    @property
    def row_bytes(self) -> int:
        return self.parts[0].entry.row_bytes

    @property
    def num_bytes(self) -> int:
        return sum(part.entry.num_bytes for part in self.parts)

    def read(self, start: int, stop: int) -> UInt8[Tensor, "R bytes"]:
        """The bytes of rows `start` to `stop`."""
        pieces, first = [], 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            begin, end = max(start - first, 0), min(stop - first, size)
            if begin < end:
                pieces.append(part.read(begin, end))
            first += size
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def chunks(self, num_weights: int, multiple: int = 1) -> Iterator[tuple[int, UInt8[Tensor, "R bytes"]]]:
        """(first row, bytes) of about `num_weights` weights at a time; every chunk but the last has a multiple of
        `multiple` rows."""
        step = max(num_weights // (self.num_columns * multiple), 1) * multiple
        for start in range(0, self.num_rows, step):
            yield start, self.read(start, min(start + step, self.num_rows))

    def values(self, dtype: torch.dtype, device: torch.device | None = None) -> Float[Tensor, "R K"]:
        """All values. Blocks are dequantised in parts, to limit the memory."""
        values = torch.empty(self.num_rows, self.num_columns, dtype=dtype, device=device)
        for start, rows in self.chunks(_CHUNK):
            values[start : start + len(rows)] = values_of(rows, self.type)
        return values


def half_split_order(num_rows: int, num_heads: int) -> Int64[Tensor, " N"]:
    """Rows of llama.cpp's q and k (pairs that rotate together are neighbours) in transformers' order (halves)."""
    return torch.arange(num_rows, dtype=torch.long, device="cpu").view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


def read_vector(file: GgufFile, entry: TensorEntry) -> Tensor:
    """Reads a tensor of plain values (a norm, a bias) in the type of the file."""
    return dense_values(file.read(entry), entry.type).view(entry.shape)


def read_values(rows: TensorRows) -> Tensor:
    """All values of a tensor: plain ones in their own type, blocks in float32, I64 as integers.

    Raises:
        CheckpointError: a type that is not read here, or the file has changed.
    """
    entry, matrix = rows.entry, Matrix((rows,))
    if entry.type == "I64":
        return matrix.read(0, matrix.num_rows).contiguous().view(torch.int64).view(entry.shape)
    if entry.type not in known_types():
        raise CheckpointError(
            f"{rows.file.path!r}: tensor {entry.name!r} is of type {entry.type}; supported here: "
            f"{', '.join(known_types())}."
        )
    if entry.type in DENSE_TYPES:
        return values_of(matrix.read(0, matrix.num_rows), entry.type).view(entry.shape)
    return matrix.values(torch.float32).view(entry.shape)


def interleaved(matrix: Tensor, num_heads: int) -> Tensor:
    """Rows of transformers' q and k in llama.cpp's order; `half_split_order` undoes it."""
    return matrix[half_split_order(len(matrix), num_heads).argsort()]


def values_of(rows: UInt8[Tensor, "R bytes"], kind: str) -> Float[Tensor, "R K"]:
    """The values of rows of a type in `known_types`: in their own type if they are not quantised, else in float32."""
    if kind in DENSE_TYPES:
        return dense_values(rows, kind)
    if kind in FORMATS:
        return FORMATS[kind].dequantize(rows)
    import gguf

    return torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))


@cache
def known_types() -> tuple[str, ...]:
    """Types of matrices that can be loaded. Those beyond `FORMATS` and `DENSE_TYPES` cannot stay packed."""
    import gguf

    others = [kind for kind in gguf.GGMLQuantizationType if kind.name not in (*FORMATS, *DENSE_TYPES)]
    return (*DENSE_TYPES, *FORMATS, *(kind.name for kind in others if _is_readable(gguf, kind)))


def _is_readable(gguf: Any, kind: Any) -> bool:
    """Whether the `gguf` package can dequantise a type. The only way to find out is to try."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
