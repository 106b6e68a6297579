"""8-bit matrices with quantised activations, for drafting, as drafts are checked anyway.

Drafts stay as good, and their products take a third to a half of the time (docs/benchmarks.md, "Heads").
"""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from . import binding, large_pages
from .backends import BUFFER_WEIGHTS, NativeBackend, QuantizingBackend
from .modules import PackedMatrix


_BLOCK_TYPE, _BLOCK_SIZE = "Q8_0", 32


class QuantizedMatrix(PackedMatrix):
    """A matrix for drafting: a copy in blocks of Q8_0 for a dense one, the same bytes for a packed one.

    Its `source` stays unchanged.
    """

    def __init__(self, source: PackedMatrix | nn.Linear, block_type: str, tiles: UInt8[Tensor, "T bytes"]):
        sizes = source.in_features, source.out_features
        super().__init__(*sizes, block_type, QuantizingBackend(), tiles)
        self.bias = source.bias
        self.source = source

    @classmethod
    @torch.no_grad()
    def of(cls, matrix: PackedMatrix | nn.Linear) -> QuantizedMatrix | None:
        """The 8-bit matrix; None if the kernel cannot use it, or its weights are not finite or exceed float16."""
        if isinstance(matrix, PackedMatrix):
            is_native = isinstance(matrix.backend, NativeBackend)
            return cls(matrix, matrix.block_type, matrix.packed.data) if is_native else None
        if (
            matrix.weight.dtype not in binding.DENSE_KINDS
            or not matrix.weight.is_cpu
            or matrix.in_features % _BLOCK_SIZE
        ):
            return None
        tiles = _tiles(matrix.weight)
        return None if tiles is None else cls(matrix, _BLOCK_TYPE, tiles)


def _tiles(weight: Tensor) -> UInt8[Tensor, "T bytes"] | None:
    """The matrix in the kernel's layout; None if a scale is not finite."""
    library, step = binding.library(), binding.TILE_ROWS
    num_rows, num_columns = weight.shape
    tiles = large_pages.zeros(-(-num_rows // step), library.tile_bytes(_BLOCK_TYPE, num_columns))
    chunk = max(BUFFER_WEIGHTS // num_columns // step, 1) * step
    for start in range(0, num_rows, chunk):
        blocks = _blocks(weight[start : start + chunk].float())
        if not library.pack(_BLOCK_TYPE, blocks, num_columns, tiles[start // step :]):
            return None
    return tiles


def _blocks(rows: Float[Tensor, "R K"]) -> UInt8[Tensor, "R bytes"]:
    """Rows in llama.cpp's Q8_0: a float16 scale and 32 signed bytes in each block."""
    groups = rows.unflatten(1, (-1, _BLOCK_SIZE))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    codes = (groups / scales).nan_to_num_(0.0).round_().to(torch.int8)
    parts = scales.to(torch.float16).view(torch.uint8), codes.view(torch.uint8)
    return torch.cat(parts, dim=-1).flatten(1)
