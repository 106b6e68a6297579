"""The contents of GGUF's blocks: a code for each weight, and the bytes of scales and offsets.

`native/kernel/formats.h` reads the same blocks for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor


@dataclass(frozen=True)
class Contents:
    """Contents of B blocks of one type.

    Attributes:
        codes: code of each weight.
        factors: 8-bit factors of scales, then of offsets: one of each for a group of weights. Empty where float16
            values are the scales themselves.
        halves: the bytes of the float16 scale, then of the float16 offset.
    """

    codes: UInt8[Tensor, "B weights"]
    factors: tuple[UInt8[Tensor, "B groups"], ...]
    halves: tuple[UInt8[Tensor, "B 2"], ...]


@dataclass(frozen=True)
class Blocks:
    """A reader of the blocks of one type.

    Attributes:
        size: weights of a block.
        num_bytes: bytes of a block.
        halves: first byte of the float16 scale, and of the float16 offset if there is one.
        codes: reads the codes.
        factors: reads the 8-bit factors.
    """

    size: int
    num_bytes: int
    halves: tuple[int, ...]
    codes: Callable[[Tensor], Tensor]
    factors: Callable[[Tensor], tuple[Tensor, ...]] = lambda blocks: ()

    def read(self, blocks: UInt8[Tensor, "B bytes"]) -> Contents:
        """The contents of B blocks."""
        halves = tuple(blocks[:, at : at + 2] for at in self.halves)
        return Contents(self.codes(blocks), self.factors(blocks), halves)


def bits(values: UInt8[Tensor, "B n"], shifts: Sequence[int], width: int) -> UInt8[Tensor, "B m"]:
    """`width` bits of each byte: those of all bytes at the first shift, then at the next one."""
    moved = values[:, None] >> torch.tensor(shifts, dtype=torch.uint8, device=values.device)[:, None]
    return (moved & (1 << width) - 1).flatten(1)


def _nibbles(first: int, last: int, size: int) -> Callable[[Tensor], Tensor]:
    """Reads nibbles: of `size` bytes at a time the low ones, then the high ones."""

    def read(blocks: Tensor) -> Tensor:
        return bits(blocks[:, first:last].reshape(-1, size), (0, 4), 4).view(len(blocks), -1)

    return read


def _pairs(first: int, last: int) -> Callable[[Tensor], Tensor]:
    """Reads two bits a weight, from 32 bytes at a time."""

    def read(blocks: Tensor) -> Tensor:
        return bits(blocks[:, first:last].reshape(-1, 32), (0, 2, 4, 6), 2).view(len(blocks), -1)

    return read


def _bits_in_order(first: int) -> Callable[[Tensor], Tensor]:
    """Reads one bit a weight, eight weights from each of four bytes."""

    def read(blocks: Tensor) -> Tensor:
        return bits(blocks[:, first : first + 4].reshape(-1, 1), range(8), 1).view(len(blocks), -1)

    return read


def _bits_by_byte(first: int) -> Callable[[Tensor], Tensor]:
    """Reads one bit a weight from 32 bytes: the lowest bit of each, then the next one."""
    return lambda blocks: bits(blocks[:, first : first + 32], range(8), 1)


def _joined(low: Callable[[Tensor], Tensor], high: Callable[[Tensor], Tensor], at: int) -> Callable[[Tensor], Tensor]:
    return lambda blocks: low(blocks) | high(blocks) << at


def _six_bit_factors(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of Q4_K and Q5_K: 6 bits each, in 12 bytes."""
    first, second, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, both & 15 | first >> 2 & 48], dim=1)
    return scales, torch.cat([second & 63, both >> 4 | second >> 2 & 48], dim=1)


def _factors_of_q3(blocks: Tensor) -> tuple[Tensor]:
    return (bits(blocks[:, 96:104], (0, 4), 4) | bits(blocks[:, 104:108], (0, 2, 4, 6), 2) << 4,)


def _factors_of_iq4(blocks: Tensor) -> tuple[Tensor]:
    low = bits(blocks[:, 4:8].reshape(-1, 1), (0, 4), 4).view(-1, 8)
    return (low | bits(blocks[:, 2:4].reshape(-1, 1), (0, 2, 4, 6), 2).view(-1, 8) << 4,)


BLOCKS = {
    "Q4_0": Blocks(32, 18, (0,), _nibbles(2, 18, 16)),
    "Q4_1": Blocks(32, 20, (0, 2), _nibbles(4, 20, 16)),
    "Q5_0": Blocks(32, 22, (0,), _joined(_nibbles(6, 22, 16), _bits_in_order(2), 4)),
    "Q5_1": Blocks(32, 24, (0, 2), _joined(_nibbles(8, 24, 16), _bits_in_order(4), 4)),
    "Q8_0": Blocks(32, 34, (0,), lambda blocks: blocks[:, 2:] ^ 128),
    "Q2_K": Blocks(256, 84, (80, 82), _pairs(16, 80), lambda blocks: (blocks[:, :16],)),
    "Q3_K": Blocks(256, 110, (108,), _joined(_pairs(32, 96), _bits_by_byte(0), 2), _factors_of_q3),
    "Q4_K": Blocks(256, 144, (0, 2), _nibbles(16, 144, 32), _six_bit_factors),
    "Q5_K": Blocks(256, 176, (0, 2), _joined(_nibbles(48, 176, 32), _bits_by_byte(16), 4), _six_bit_factors),
    "Q6_K": Blocks(
        256, 210, (208,), _joined(_nibbles(0, 128, 64), _pairs(128, 192), 4), lambda blocks: (blocks[:, 192:208] ^ 128,)
    ),
    "IQ4_NL": Blocks(32, 18, (0,), _nibbles(2, 18, 16)),
    "IQ4_XS": Blocks(256, 136, (0,), _nibbles(8, 136, 16), _factors_of_iq4),
}
