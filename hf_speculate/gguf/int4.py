"""Packs blocks for torch's int4 kernel (`_weight_int4pack_mm_for_cpu`), the integers exactly as they are.

The kernel computes x @ w.T with w = (code - 8) * scale + zero, codes 0 to 15, scale and zero shared by a group of 32,
64, 128 or 256 columns. Types of up to 16 different integers fit as they are. Wider ones are written in base 16, two
codes a weight: a group holds the low digits of half as many weights, then their high digits, and meets [x ; 16 x], so
that one scale serves both. Only scales and zeros are rounded, to the dtype of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from ..errors import CheckpointError
from .formats import FORMATS, BlockFormat
from .matrices import Matrix


# The kernel's layout puts rows in tiles of 64, 32 or 16, whatever the CPU has: multiples of 64 can be packed apart.
_TILE_ROWS = 64
_ROW_MULTIPLE = 16
_GROUPS = (32, 64, 128, 256)

# Weights that are unpacked at a time while loading: a few megabytes, which the allocator gives back.
_CHUNK_WEIGHTS = 1 << 19


@dataclass(frozen=True)
class Int4Layout:
    """How one block type is written in codes.

    Attributes:
        num_planes: codes a weight.
        span: neighbouring weights in one group of the kernel.
        bias: what is added to an integer to make it a code, or two digits.
    """

    num_planes: int
    span: int
    bias: int

    @property
    def group(self) -> int:
        """Columns that share a scale, the kernel's `qGroupSize`."""
        return self.num_planes * self.span

    def columns(self, num_weights: int) -> int:
        return self.num_planes * num_weights

    def codes(self, integers: Int[Tensor, "R K"]) -> Int[Tensor, "R columns"]:
        """int32 codes, 0 to 15."""
        codes = integers.to(torch.int32) + self.bias
        if self.num_planes == 1:
            return codes
        spans = codes.unflatten(1, (-1, self.span))
        return torch.stack([spans & 15, spans >> 4], dim=2).flatten(1)

    def zeros(
        self, scales: Float[Tensor, "R groups"], offsets: Float[Tensor, "R groups"] | None
    ) -> Float[Tensor, "R groups"]:
        """What the kernel adds: the offset of the weights, and what the bias and its own -8 take off.

        Both digits of a weight meet the zero, one with x and one with 16 x: it counts 17 times.
        """
        neutral, weight_of_zero = (8, 1) if self.num_planes == 1 else (8 + 16 * 8, 1 + 16)
        zeros = scales * (neutral - self.bias)
        return (zeros if offsets is None else zeros + offsets) / weight_of_zero

    def inputs(self, inputs: Float[Tensor, "M K"]) -> Float[Tensor, "M columns"]:
        """What the codes are multiplied with."""
        if self.num_planes == 1:
            return inputs
        spans = inputs.unflatten(1, (-1, 1, self.span))
        return torch.cat([spans, 16 * spans], dim=2).flatten(1)


def layout_of(block_format: BlockFormat) -> Int4Layout:
    """One plane where integers and group size allow it, else two."""
    low, high = block_format.low, block_format.high
    if high - low < 16 and block_format.group in _GROUPS:
        return Int4Layout(1, block_format.group, -low)
    # 136 = 8 + 16 * 8 needs no zero; it is taken where the highest integer still fits in two digits.
    return Int4Layout(2, min(block_format.group, max(_GROUPS) // 2), min(136, 255 - high))


LAYOUTS = {name: layout_of(block_format) for name, block_format in FORMATS.items()}


def pack(matrix: Matrix, dtype: torch.dtype) -> tuple[UInt8[Tensor, "N bytes"], Float[Tensor, "groups N 2"]]:
    """Codes in the kernel's own layout (which depends on the CPU: never save it), and scales with zeros.

    N is the number of rows, made a multiple of 16 with zeros.

    Raises:
        CheckpointError: scales that are not finite.
    """
    block_format, layout = FORMATS[matrix.type], LAYOUTS[matrix.type]
    num_columns = layout.columns(matrix.num_columns)
    num_rows = -(-matrix.num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
    weight = torch.empty(num_rows, num_columns // 2, dtype=torch.uint8)
    scales_and_zeros = torch.zeros(num_columns // layout.group, num_rows, 2, dtype=dtype)
    for start, rows in matrix.chunks(_CHUNK_WEIGHTS, _TILE_ROWS):
        integers, scales, offsets = block_format.split(rows)
        zeros = layout.zeros(scales, offsets)
        check_finite(zeros, matrix)
        codes, stop = layout.codes(integers), start + len(rows)
        padding = -len(rows) % _ROW_MULTIPLE  # of the last rows only
        codes = torch.nn.functional.pad(codes, (0, 0, 0, padding))
        weight[start : stop + padding] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        repeats = block_format.group // layout.span
        for place, values in enumerate((scales, zeros)):
            scales_and_zeros[:, start:stop, place] = values.repeat_interleave(repeats, dim=1).T.to(dtype)
    return weight, scales_and_zeros


def check_finite(scales: Tensor, matrix: Matrix) -> None:
    """Raises `CheckpointError` for scales that are infinite or no numbers."""
    if not scales.isfinite().all():
        raise not_finite(matrix)


def not_finite(matrix: Matrix) -> CheckpointError:
    """What is raised for such scales."""
    return CheckpointError(f"{', '.join(matrix.names)} ({matrix.type}): some scales are not finite.")


def multiply(
    inputs: Float[Tensor, "M K"],
    weight: UInt8[Tensor, "N bytes"],
    scales_and_zeros: Float[Tensor, "groups N 2"],
    layout: Int4Layout,
) -> Float[Tensor, "M N"]:
    """x @ w.T in the dtype of the scales."""
    columns = layout.inputs(inputs.to(scales_and_zeros.dtype)).contiguous()
    return torch.ops.aten._weight_int4pack_mm_for_cpu(columns, weight, layout.group, scales_and_zeros)
