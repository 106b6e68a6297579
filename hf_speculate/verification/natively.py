"""Noise and greedy choices on CPUs: by torch, or several times faster by a kernel that was seen to do the same.

torch draws one value of noise after the other, 20 ns each: for a vocabulary of 150,000 that is 3 ms a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor


@runtime_checkable
class Kernel(Protocol):
    """What may stand in for torch on CPUs."""

    def draw_exponential(self, state: UInt8[Tensor, " S"], values: Float[Tensor, "*N"]) -> None:
        """Fills contiguous float32 values as `exponential_` does with a generator in this state (from
        `Generator.get_state`), and moves the state on."""
        ...

    def argmax(self, row: Float[Tensor, " V"]) -> int:
        """Of a contiguous row in float32 or bfloat16: the first of the largest, the first NaN where there is one."""
        ...


_draw: list[Callable[[Tensor, Tensor], None]] = []
_argmax: list[Callable[[Tensor], int]] = []


def stand_in(kernel: Kernel) -> tuple[bool, bool]:
    """Lets a kernel draw noise, and choose, from now on: each only if its answers are torch's to the last bit.

    Returns:
        Whether it draws, and whether it chooses.
    """
    draws = all(_draws_alike(kernel, num_before, count) for num_before, count in ((0, 5), (1, 4099), (0, 1 << 14)))
    chooses = all(_chooses_alike(kernel, dtype) for dtype in (torch.float32, torch.bfloat16))
    if draws:
        _draw[:] = [kernel.draw_exponential]
    if chooses:
        _argmax[:] = [kernel.argmax]
    return draws, chooses


def exponential(values: Tensor, generator: torch.Generator) -> Tensor:
    """`values.exponential_(generator=generator)` of new float32 values."""
    if not _draw or not values.is_cpu:
        return values.exponential_(generator=generator)
    state = generator.get_state()
    _draw[0](state, values)
    generator.set_state(state)
    return values


def argmax(scores: Float[Tensor, "R V"]) -> list[int]:
    """`scores.float().argmax(-1)`: the operation of stock, and in float32 four times faster than in bfloat16."""
    is_row = len(scores) == 1 and scores.dtype in (torch.bfloat16, torch.float32) and scores.is_contiguous()
    if not _argmax or not scores.is_cpu or not is_row or not scores.shape[1]:
        return scores.float().argmax(-1).tolist()
    return [_argmax[0](scores[0])]


def _draws_alike(kernel: Kernel, num_before: int, count: int) -> bool:
    generator = torch.Generator().manual_seed(num_before + count)
    torch.empty(num_before, dtype=torch.long).random_(100, generator=generator)
    state, found = generator.get_state(), torch.empty(count)
    kernel.draw_exponential(state, found)
    wanted = torch.empty(count).exponential_(generator=generator)
    return torch.equal(found, wanted) and torch.equal(state, generator.get_state())


def _chooses_alike(kernel: Kernel, dtype: torch.dtype) -> bool:
    rows = torch.randint(-9, 9, (3, 133), generator=torch.Generator().manual_seed(0)).to(dtype)  # with ties
    rows[1, [70, 90]] = torch.nan
    rows[2] = -torch.inf
    return [kernel.argmax(row) for row in rows] == rows.float().argmax(-1).tolist()
