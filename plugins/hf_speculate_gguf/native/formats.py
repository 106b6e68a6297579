"""GGUF's block formats, and their weights as transformers dequantises them.

The kernel multiplies with the integers of the blocks (`kernel/formats.h`); this is its reference. Tests compare both
with the `gguf` package's `dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from hf_speculate.compatibility import check_feature


@dataclass(frozen=True)
class BlockFormat:
    """A block type: its number in ggml, and the weights and bytes of a block."""

    number: int
    block_size: int
    block_bytes: int

    def dequantize(self, rows: UInt8[Tensor, "R bytes"]) -> Float[Tensor, "R K"]:
        """The weights of R rows of blocks, in float32."""
        num_columns = rows.shape[1] // self.block_bytes * self.block_size
        if not len(rows):
            return torch.empty(0, num_columns, device=rows.device, dtype=torch.float32)
        if self.number in _FIVE_BITS:
            values = _five_bits(rows.reshape(-1, self.block_bytes), *_FIVE_BITS[self.number])
        else:
            values = _dequantize()(rows.contiguous(), self.number)
        return values.view(len(rows), num_columns)


@cache
def _dequantize() -> Callable[[Tensor, int], Tensor]:
    """The function of transformers that dequantises blocks. It is not needed where the kernel computes."""
    check_feature("dequantising GGUF weights", "5.18")
    from transformers.integrations.gguf import dequant

    return dequant.dequantize


# Types that transformers does not know: whether they have an offset, and what is subtracted from their integers.
_FIVE_BITS = {6: (False, 16), 7: (True, 0)}


def _five_bits(blocks: Tensor, has_offset: bool, bias: int) -> Tensor:
    """The weights of Q5_0 and Q5_1: four low bits in nibbles after 32 high ones."""
    halves = blocks[:, : 4 if has_offset else 2].contiguous().view(torch.float16).float()
    high, low = blocks[:, -20:-16], blocks[:, -16:]
    high_bits = (high[..., None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1).flatten(1)
    integers = torch.cat([low & 15, low >> 4], dim=1) | high_bits << 4
    values = (integers.to(torch.int8) - bias) * halves[:, :1]
    return values + halves[:, 1:] if has_offset else values


FORMATS = {
    "Q4_0": BlockFormat(2, 32, 18),
    "Q4_1": BlockFormat(3, 32, 20),
    "Q5_0": BlockFormat(6, 32, 22),
    "Q5_1": BlockFormat(7, 32, 24),
    "Q8_0": BlockFormat(8, 32, 34),
    "Q2_K": BlockFormat(10, 256, 84),
    "Q3_K": BlockFormat(11, 256, 110),
    "Q4_K": BlockFormat(12, 256, 144),
    "Q5_K": BlockFormat(13, 256, 176),
    "Q6_K": BlockFormat(14, 256, 210),
    "IQ4_NL": BlockFormat(20, 32, 18),
    "IQ4_XS": BlockFormat(23, 256, 136),
}

# Types of plain values, without blocks.
DENSE_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dense_values(rows: UInt8[Tensor, "R bytes"], kind: str) -> Tensor:
    """The values of rows of F32, F16 or BF16: [R, K] in that type."""
    return rows.contiguous().view(DENSE_TYPES[kind])
