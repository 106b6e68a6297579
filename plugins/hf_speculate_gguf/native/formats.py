"""GGUF's block formats: integers, with a scale and an offset for each group of them.

    weight = integer * scale + offset

The integers and both factors are exactly those of the file. The layouts are those of llama.cpp's `ggml-quants`. Tests
compare with the `gguf` package's `dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int16, UInt8
from torch import Tensor


# Integers int16 [B, block_size], scales float32 [B, groups], offsets float32 [B, groups] or None if all are zero.
Decoded = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class BlockFormat:
    """A block type.

    Attributes:
        name: ggml's name.
        block_size, block_bytes: weights and bytes of a block.
        group: number of neighbouring weights that share scale and offset.
        low, high: smallest and largest integer.
        decode: function from uint8 [B, block_bytes] to integers, scales and offsets of B blocks.
    """

    name: str
    block_size: int
    block_bytes: int
    group: int
    low: int
    high: int
    decode: Callable[[Tensor], Decoded]

    def split(
        self, rows: UInt8[Tensor, "R bytes"]
    ) -> tuple[Int16[Tensor, "R K"], Float[Tensor, "R groups"], Float[Tensor, "R groups"] | None]:
        """Integers, scales and offsets of R rows of blocks."""
        num_rows = rows.shape[0]
        integers, scales, offsets = self.decode(rows.reshape(-1, self.block_bytes))
        offsets = None if offsets is None else offsets.reshape(num_rows, -1)
        return integers.reshape(num_rows, -1), scales.reshape(num_rows, -1), offsets

    def dequantize(self, rows: UInt8[Tensor, "R bytes"]) -> Float[Tensor, "R K"]:
        """The weights of R rows, in float32."""
        integers, scales, offsets = self.split(rows)
        groups = integers.unflatten(1, (-1, self.group)).float() * scales[..., None]
        return (groups if offsets is None else groups + offsets[..., None]).flatten(1)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """float32 [B, 1]: the float16 at byte `start` of each block."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _bits(values: Tensor, width: int, fields: int) -> Tensor:
    """uint8 [..., fields, n] from uint8 [..., n]: bit fields of `width` bits of each byte, lowest first."""
    shifts = torch.arange(0, fields * width, width, dtype=torch.uint8, device=values.device)
    return values[..., None, :] >> shifts[:, None] & (1 << width) - 1


def _nibbles(blocks: Tensor) -> Tensor:
    """int16 [B, 2n] for n bytes: all low halves, then all high ones."""
    return _bits(blocks, 4, 2).flatten(1).to(torch.int16)


def _fifth_bits(blocks: Tensor) -> Tensor:
    """int16 [B, 32], 0 or 16, for four bytes: bit i belongs to weight i."""
    return _bits(blocks, 1, 8).transpose(1, 2).flatten(1).to(torch.int16) << 4


def _q4_0(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 2:]) - 8, _halves(blocks, 0), None


def _q4_1(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Tensor) -> Decoded:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])) - 16, _halves(blocks, 0), None


def _q5_1(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Tensor) -> Decoded:
    return blocks[:, 2:].contiguous().view(torch.int8).to(torch.int16), _halves(blocks, 0), None


def _q2_k(blocks: Tensor) -> Decoded:
    scales = _bits(blocks[:, :16], 4, 2).float()
    quarters = _bits(blocks[:, 16:80].unflatten(1, (2, 32)), 2, 4)
    scale, minimum = _halves(blocks, 80), _halves(blocks, 82)
    return quarters.flatten(1).to(torch.int16), scale * scales[:, 0], -(minimum * scales[:, 1])


def _q3_k(blocks: Tensor) -> Decoded:
    """Multiplies the sixteen 6-bit scales of a block into its integers, so that one scale holds for all 256."""
    low = _bits(blocks[:, 32:96].unflatten(1, (2, 32)), 2, 4).flatten(1).to(torch.int16)
    high = _bits(blocks[:, :32], 1, 8).flatten(1).to(torch.int16)
    digits = low - 4 * (1 - high)
    packed = blocks[:, 96:108]
    scales = _bits(packed[:, :8], 4, 2).flatten(1) | _bits(packed[:, 8:], 2, 4).flatten(1) << 4
    scales = scales.to(torch.int16) - 32
    return (digits.unflatten(1, (16, 16)) * scales[..., None]).flatten(1), _halves(blocks, 108), None


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [B, 8] twice: scales and minima of Q4_K and Q5_K from their twelve bytes."""
    first, second, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, high & 15 | first >> 2 & 48], dim=1)
    minima = torch.cat([second & 63, high >> 4 | second >> 2 & 48], dim=1)
    return scales.float(), minima.float()


def _four_or_five_k(blocks: Tensor, integers: Tensor) -> Decoded:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    return integers.to(torch.int16), _halves(blocks, 0) * scales, -(_halves(blocks, 2) * minima)


def _q4_k(blocks: Tensor) -> Decoded:
    return _four_or_five_k(blocks, _bits(blocks[:, 16:].unflatten(1, (4, 32)), 4, 2).flatten(1))


def _q5_k(blocks: Tensor) -> Decoded:
    low = _bits(blocks[:, 48:].unflatten(1, (4, 32)), 4, 2).flatten(1)
    return _four_or_five_k(blocks, low | _bits(blocks[:, 16:48], 1, 8).flatten(1) << 4)


def _q6_k(blocks: Tensor) -> Decoded:
    low = _bits(blocks[:, :128].unflatten(1, (2, 64)), 4, 2).flatten(1)
    high = _bits(blocks[:, 128:192].unflatten(1, (2, 32)), 2, 4).flatten(1)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (low | high << 4).to(torch.int16) - 32, _halves(blocks, 208) * scales, None


# Integers that the codes of IQ4_NL and IQ4_XS stand for.
_IQ4_INTEGERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _looked_up(codes: Tensor) -> Tensor:
    return torch.tensor(_IQ4_INTEGERS, dtype=torch.int16, device=codes.device)[codes.long()]


def _iq4_nl(blocks: Tensor) -> Decoded:
    return _looked_up(_nibbles(blocks[:, 2:])), _halves(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> Decoded:
    """Decodes scales of six bits; the two high bits of all eight are in bytes 2 and 3."""
    high = _bits(blocks[:, 2:4], 2, 4).transpose(1, 2).flatten(1)
    scales = _bits(blocks[:, 4:8], 4, 2).transpose(1, 2).flatten(1) | high << 4
    codes = _bits(blocks[:, 8:].unflatten(1, (8, 16)), 4, 2).flatten(1)
    return _looked_up(codes), _halves(blocks, 0) * (scales.float() - 32), None


FORMATS = {
    block_format.name: block_format
    for block_format in (
        BlockFormat("Q4_0", 32, 18, 32, -8, 7, _q4_0),
        BlockFormat("Q4_1", 32, 20, 32, 0, 15, _q4_1),
        BlockFormat("Q5_0", 32, 22, 32, -16, 15, _q5_0),
        BlockFormat("Q5_1", 32, 24, 32, 0, 31, _q5_1),
        BlockFormat("Q8_0", 32, 34, 32, -128, 127, _q8_0),
        BlockFormat("Q2_K", 256, 84, 16, 0, 3, _q2_k),
        BlockFormat("Q3_K", 256, 110, 256, -124, 128, _q3_k),
        BlockFormat("Q4_K", 256, 144, 32, 0, 15, _q4_k),
        BlockFormat("Q5_K", 256, 176, 32, 0, 31, _q5_k),
        BlockFormat("Q6_K", 256, 210, 16, -32, 31, _q6_k),
        BlockFormat("IQ4_NL", 32, 18, 32, -127, 113, _iq4_nl),
        BlockFormat("IQ4_XS", 256, 136, 32, -127, 113, _iq4_xs),
    )
}

# Types of plain values, without blocks.
DENSE_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dense_values(rows: UInt8[Tensor, "R bytes"], kind: str) -> Tensor:
    """The values of rows of F32, F16 or BF16: [R, K] in that type."""
    return rows.contiguous().view(DENSE_TYPES[kind])
