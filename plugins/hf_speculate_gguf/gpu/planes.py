"""The layout of packed matrices for a GPU: tiles of 64 matrix rows, and in a tile planes of bits and scales.

Neighbours in memory are the same column of neighbouring matrix rows, so threads of a warp load 16 bytes each, side by
side. A tile is one piece of memory, so a matrix of the first rows is a slice.

The columns are cut into slabs. In a slab, `codes_per_word` runs of `run` columns share their words: bits 4 j to 4 j + 3
of word r (for a low width of 4) are those of column j * run + r. So one load gives the operands of several products,
each by a shift and a mask. High bits lie in a plane of their own with the same order.

The layout is a permutation of the file's bits; `unpack` undoes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from .blocks import BLOCKS, bits


TILE_ROWS = 64
"""Matrix rows of a tile."""

_SUPER = 256  # columns that share float16 values where groups have 8-bit factors

# The integers of IQ4_NL and IQ4_XS, plus 128.
TABLE = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)


class Offsets(NamedTuple):
    """First byte of each plane in a tile; the first plane holds low bits and starts at 0. `end` is the tile's size.

    Planes that a type lacks are empty.
    """

    high: int
    scale_factors: int
    offset_factors: int
    scales: int
    offsets: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The layout of a type.

    A weight is scale * integer, plus an offset for some types. The integer is code - bias, or an entry of a table.

    Attributes:
        low: low bits of a code, in one plane.
        high: other bits of a code, in another plane.
        run: columns of a slab that share a position in their words.
        group: columns that share a scale.
        bias: number that is subtracted from a code.
        has_offset: whether weights have an offset.
        num_factors: bytes of 8-bit factors for each group. 0: float16 values are the scales. With one byte and
            offsets, each has four bits of it.
        factor_bias: number that is subtracted from a factor.
        looks_up: whether a code is an index of TABLE.
    """

    low: int
    high: int
    run: int
    group: int
    bias: int
    has_offset: bool = False
    num_factors: int = 0
    factor_bias: int = 0
    looks_up: bool = False

    @property
    def codes_per_word(self) -> int:
        return 4 if self.low == 8 else 8

    @property
    def slab(self) -> int:
        """Columns of a slab."""
        return self.run * self.codes_per_word

    @property
    def scale_bytes(self) -> int:
        """Bytes of neighbouring columns of a plane of float16 values: two values where each group has its own."""
        return 2 if self.num_factors else 4

    def num_slabs(self, num_columns: int) -> int:
        return -(-num_columns // self.slab)

    def offsets(self, num_columns: int) -> Offsets:
        """The planes of a tile of a matrix with so many columns."""
        columns = self.num_slabs(num_columns) * self.slab
        cells, kinds = columns * TILE_ROWS, 1 + self.has_offset
        num_halves = cells // (_SUPER if self.num_factors else self.group)
        num_factors = cells // self.group if self.num_factors else 0
        sizes = [
            *(cells * self.low // 8, cells * self.high // 8),
            *(num_factors, num_factors * (self.num_factors - 1) if self.num_factors else 0),
            *(2 * num_halves, 2 * num_halves * (kinds - 1)),
        ]
        starts = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return Offsets(*starts)


LAYOUTS = {
    "Q4_0": Layout(4, 0, 16, 32, 8),
    "Q4_1": Layout(4, 0, 16, 32, 0, has_offset=True),
    "Q5_0": Layout(4, 1, 16, 32, 16),
    "Q5_1": Layout(4, 1, 16, 32, 0, has_offset=True),
    "Q8_0": Layout(8, 0, 32, 32, 128),
    "Q2_K": Layout(2, 0, 16, 16, 0, has_offset=True, num_factors=1),
    "Q3_K": Layout(2, 1, 16, 16, 4, num_factors=1, factor_bias=32),
    "Q4_K": Layout(4, 0, 16, 32, 0, has_offset=True, num_factors=2),
    "Q5_K": Layout(4, 1, 16, 32, 0, has_offset=True, num_factors=2),
    "Q6_K": Layout(4, 2, 16, 16, 32, num_factors=1, factor_bias=128),
    "IQ4_NL": Layout(4, 0, 16, 32, 128, looks_up=True),
    "IQ4_XS": Layout(4, 0, 16, 32, 128, num_factors=1, factor_bias=32, looks_up=True),
}
"""Layout of each type that can stay packed on a GPU."""


def tile_bytes(block_type: str, num_columns: int) -> int:
    """Bytes of a tile of a matrix with so many columns."""
    return LAYOUTS[block_type].offsets(num_columns).end


def pack(rows: UInt8[Tensor, "R bytes"], block_type: str) -> UInt8[Tensor, "tiles bytes"] | None:
    """Tiles of R matrix rows, with zeros in rows and columns beyond the end; None if a scale is not finite."""
    blocks, layout = BLOCKS[block_type], LAYOUTS[block_type]
    contents = blocks.read(rows.reshape(-1, blocks.num_bytes))
    if not all(half.contiguous().view(torch.float16).isfinite().all() for half in contents.halves):
        return None
    num_columns = rows.shape[1] // blocks.num_bytes * blocks.size
    missing = layout.num_slabs(num_columns) * layout.slab - num_columns
    missing_rows = -len(rows) % TILE_ROWS
    codes = functional.pad(contents.codes.view(len(rows), -1), (0, missing, 0, missing_rows))
    codes = codes.view(-1, TILE_ROWS, layout.num_slabs(num_columns), layout.codes_per_word, layout.run)
    codes = codes.permute(0, 2, 4, 1, 3)  # tile, slab, column of a run, matrix row, run
    planes = [_packed_bits(codes & (1 << layout.low) - 1, layout.low)]
    if layout.high:
        planes.append(_packed_bits(codes >> layout.low, layout.high))
    num_bytes = layout.scale_bytes
    padding = (0, missing // layout.group * (1 if layout.num_factors else 2), 0, missing_rows)
    for values, size in (*((each, 4) for each in contents.factors), *((each, num_bytes) for each in contents.halves)):
        planes.append(_by_tile(functional.pad(values.reshape(len(rows), -1), padding), size))
    return torch.cat(planes, dim=1)


def _packed_bits(codes: Tensor, width: int) -> UInt8[Tensor, "tiles bytes"]:
    """`width` bits of each code, side by side along the last dimension."""
    parts = codes.unflatten(-1, (-1, 8 // width))
    packed = torch.zeros(parts.shape[:-1], dtype=torch.uint8, device=codes.device)
    for i in range(8 // width):
        packed |= parts[..., i] << i * width
    return packed.flatten(1)


def _by_tile(values: UInt8[Tensor, "R n"], size: int) -> UInt8[Tensor, "tiles bytes"]:
    """Words of `size` bytes, those of neighbouring rows side by side."""
    return values.view(-1, TILE_ROWS, values.shape[1] // size, size).transpose(1, 2).flatten(1)


def unpack(
    tiles: UInt8[Tensor, "tiles bytes"], block_type: str, num_rows: int, num_columns: int
) -> Float[Tensor, "R K"]:
    """float32: the weights in tiles. They have the bits of the `gguf` package's."""
    layout = LAYOUTS[block_type]
    at = layout.offsets(num_columns)
    codes = _codes(tiles[:, : at.high], layout, layout.low)
    if layout.high:
        codes |= _codes(tiles[:, at.high : at.scale_factors], layout, layout.high) << layout.low
    if layout.looks_up:
        codes = torch.tensor(TABLE, dtype=torch.uint8, device=tiles.device)[codes.long()]
    scales, offsets = _factors(tiles, layout, at)
    weights = (codes.float() - layout.bias).unflatten(1, (-1, layout.group)) * scales[..., None]
    if offsets is not None:
        weights += offsets[..., None]
    return weights.flatten(1)[:num_rows, :num_columns]


def _codes(plane: UInt8[Tensor, "tiles bytes"], layout: Layout, width: int) -> UInt8[Tensor, "R K"]:
    """The bits of a plane: rows and columns in the order of the file."""
    per_byte = 8 // width
    parts = bits(plane.reshape(-1, 1), range(0, 8, width), width)
    cells = parts.view(len(plane), -1, layout.run, TILE_ROWS, layout.codes_per_word // per_byte * per_byte)
    return cells.permute(0, 3, 1, 4, 2).reshape(len(plane) * TILE_ROWS, -1)


def _factors(tiles: Tensor, layout: Layout, at: Offsets) -> tuple[Tensor, Tensor | None]:
    """float32 [R, groups]: the scales, and the offsets if there are some."""

    def cells(start: int, stop: int, size: int, dtype: torch.dtype) -> Tensor:
        words = tiles[:, start:stop].reshape(len(tiles), -1, TILE_ROWS, size).transpose(1, 2)
        return words.flatten(2).flatten(0, 1).view(dtype)

    scales = cells(at.scales, at.offsets, layout.scale_bytes, torch.float16).float()
    offsets = None
    if layout.has_offset:
        offsets = cells(at.offsets, at.end, layout.scale_bytes, torch.float16).float()
    if not layout.num_factors:
        return scales, offsets
    factors = cells(at.scale_factors, at.offset_factors, 4, torch.uint8)
    of_offsets = cells(at.offset_factors, at.scales, 4, torch.uint8)
    if layout.has_offset and layout.num_factors == 1:
        factors, of_offsets = factors & 15, factors >> 4
    repeats = _SUPER // layout.group
    scales = scales.repeat_interleave(repeats, 1) * (factors.float() - layout.factor_bias)
    if offsets is not None:
        offsets = -(offsets.repeat_interleave(repeats, 1) * of_offsets.float())
    return scales, offsets
