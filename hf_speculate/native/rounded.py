"""Matrices in 8 bits, multiplied with inputs in 8 bits: for what drafts, whose proposals are checked anyway.

Drafts are as good as they were, and their products take a third of the time (docs/benchmarks.md, "Heads").
"""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from . import binding, large_pages
from .backends import BUFFER_WEIGHTS, NativeBackend, RoundingBackend
from .modules import PackedMatrix


_BLOCK_TYPE, _BLOCK_SIZE = "Q8_0", 32


class RoundedMatrix(PackedMatrix):
    """The same matrix for drafts: a copy in blocks of Q8_0 beside a dense one, the same bytes if it is packed.

    Attributes:
        source: the matrix, which stays what it is.
    """

    def __init__(self, source: PackedMatrix | nn.Linear, block_type: str, tiles: UInt8[Tensor, "T bytes"]):
        sizes = source.in_features, source.out_features
        super().__init__(*sizes, block_type, RoundingBackend(), {"packed": tiles})
        self.bias = source.bias
        self.source = source

    @classmethod
    @torch.no_grad()
    def of(cls, matrix: PackedMatrix | nn.Linear) -> RoundedMatrix | None:
        """None where the kernel does not multiply with it, or its weights are not finite or beyond float16."""
        if isinstance(matrix, PackedMatrix):
            is_native = isinstance(matrix.backend, NativeBackend)
            return cls(matrix, matrix.block_type, matrix.packed) if is_native else None
        if (
            matrix.weight.dtype not in binding.DENSE_KINDS
            or not matrix.weight.is_cpu
            or matrix.in_features % _BLOCK_SIZE
        ):
            return None
        tiles = _tiles(matrix.weight)
        return None if tiles is None else cls(matrix, _BLOCK_TYPE, tiles)


def _tiles(weight: Tensor) -> UInt8[Tensor, "T bytes"] | None:
    """The matrix as the kernel takes it; None where a scale is not finite."""
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
    """Rows as llama.cpp packs them in Q8_0: a scale in float16 and 32 signed bytes a block."""
    groups = rows.unflatten(1, (-1, _BLOCK_SIZE))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    codes = (groups / scales).nan_to_num_(0.0).round_().to(torch.int8)
    parts = scales.to(torch.float16).view(torch.uint8), codes.view(torch.uint8)
    return torch.cat(parts, dim=-1).flatten(1)
