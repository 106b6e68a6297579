"""Noise, greedy choices and most probable tokens on CPUs: by torch, or by a faster kernel with the same results.

torch draws noise values one by one, at 20 ns each: 3 ms per token for a vocabulary of 150,000.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor


Probable = tuple[Float[Tensor, "R N K"], Int[Tensor, "R N K"]]


@runtime_checkable
class Kernel(Protocol):
    """A replacement for some torch functions on CPUs."""

    def draw_exponential(self, state: UInt8[Tensor, " S"], values: Float[Tensor, "*N"]) -> None:
        """Fills contiguous float32 `values` as `exponential_` does, and advances the generator state.

        `state` comes from `Generator.get_state`.
        """
        ...

    def argmax(self, row: Float[Tensor, " V"]) -> int:
        """Index of the first largest value, or of the first NaN, in a contiguous row of float32 or bfloat16."""
        ...

    def most_probable(self, scores: Float[Tensor, "R N V"], count: int) -> Probable:
        """The result of the function `most_probable`. Scores are float32 or bfloat16, with evenly spaced rows."""
        ...


_draw: list[Callable[[Tensor, Tensor], None]] = []
_argmax: list[Callable[[Tensor], int]] = []
_probable: list[Callable[[Tensor, int], Probable]] = []

_BLOCK = 64


def stand_in(kernel: Kernel) -> tuple[bool, bool, bool]:
    """Makes a kernel draw noise, choose and rank from now on, each only if its results are torch's bit for bit.

    Probabilities may differ by rounding: only drafts depend on them.

    Returns:
        Whether the kernel draws, whether it chooses, and whether it ranks.
    """
    draws = all(_draws_alike(kernel, num_before, count) for num_before, count in ((0, 5), (1, 4099), (0, 1 << 14)))
    chooses = all(_chooses_alike(kernel, dtype) for dtype in (torch.float32, torch.bfloat16))
    ranks = all(_ranks_alike(kernel, dtype) for dtype in (torch.float32, torch.bfloat16))
    if draws:
        _draw[:] = [kernel.draw_exponential]
    if chooses:
        _argmax[:] = [kernel.argmax]
    if ranks:
        _probable[:] = [kernel.most_probable]
    return draws, chooses, ranks


def exponential(values: Tensor, generator: torch.Generator) -> Tensor:
    """`values.exponential_(generator=generator)`, for new float32 values."""
    if not _draw or not values.is_cpu:
        return values.exponential_(generator=generator)
    state = generator.get_state()
    _draw[0](state, values)
    generator.set_state(state)
    return values


def argmax(scores: Float[Tensor, "R V"]) -> list[int]:
    """`scores.float().argmax(-1)`, as stock computes it. On bfloat16 itself argmax would be four times slower."""
    is_known = scores.is_cpu and scores.dtype in (torch.bfloat16, torch.float32) and scores.stride(-1) == 1
    if not _argmax or not is_known or not scores.shape[1]:
        return scores.float().argmax(-1).tolist()
    return [_argmax[0](row) for row in scores]


def most_probable(scores: Float[Tensor, "R N V"], count: int) -> Probable:
    """The `count` tokens with the largest scores, and their probabilities among these, largest first.

    Ties come in any order. All probabilities are 0 where scores are not finite.
    """
    is_known = _probable and scores.is_cpu and scores.dtype in (torch.bfloat16, torch.float32)
    num_nodes, (between_rows, between_nodes, step) = scores.shape[1], scores.stride()
    if is_known and step == 1 and (len(scores) == 1 or between_rows == num_nodes * between_nodes):
        return _probable[0](scores, count)
    values, token_ids = _largest(scores.float(), count)
    return values.softmax(-1).nan_to_num(), token_ids


def _largest(scores: Float[Tensor, "R N V"], count: int) -> tuple[Tensor, Tensor]:
    """`scores.topk(count)`, three to five times faster on a CPU.

    The largest scores are in the `count` blocks with the largest maxima.
    """
    num_blocks = scores.shape[-1] // _BLOCK
    if num_blocks <= count:
        return scores.topk(count)
    whole = num_blocks * _BLOCK
    blocks = scores[..., :whole].unflatten(-1, (num_blocks, _BLOCK))
    chosen = blocks.amax(-1).topk(count).indices
    places = (chosen[..., None] * _BLOCK + torch.arange(_BLOCK, device=scores.device, dtype=torch.long)).flatten(-2)
    rest = torch.arange(whole, scores.shape[-1], device=scores.device, dtype=torch.long).expand(*scores.shape[:-1], -1)
    places = torch.cat([places, rest], dim=-1)
    values, best = scores.gather(-1, places).topk(count)
    return values, places.gather(-1, best)


def _draws_alike(kernel: Kernel, num_before: int, count: int) -> bool:
    generator = torch.Generator().manual_seed(num_before + count)
    torch.empty(num_before, dtype=torch.long, device="cpu").random_(100, generator=generator)
    state, drawn = generator.get_state(), torch.empty(count, dtype=torch.float32, device="cpu")
    kernel.draw_exponential(state, drawn)
    wanted = torch.empty(count, dtype=torch.float32, device="cpu").exponential_(generator=generator)
    return torch.equal(drawn, wanted) and torch.equal(state, generator.get_state())


def _chooses_alike(kernel: Kernel, dtype: torch.dtype) -> bool:
    rows = torch.randint(
        -9, 9, (3, 133), generator=torch.Generator().manual_seed(0), dtype=torch.long, device="cpu"
    ).to(dtype)  # with ties
    rows[1, [70, 90]] = torch.nan
    rows[2] = -torch.inf
    return [kernel.argmax(row) for row in rows] == rows.float().argmax(-1).tolist()


def _ranks_alike(kernel: Kernel, dtype: torch.dtype) -> bool:
    scores = torch.randint(
        -99, 99, (1, 4, 133), generator=torch.Generator().manual_seed(0), dtype=torch.long, device="cpu"
    ).to(dtype)
    scores[0, 1, 90], scores[0, 2], scores[0, 3, :9] = torch.nan, -torch.inf, -torch.inf
    probs, token_ids = kernel.most_probable(scores, 9)
    if not ((token_ids >= 0) & (token_ids < 133)).all():
        return False
    values = scores.float().topk(9).values
    chosen, is_finite = scores.float().gather(-1, token_ids), values[..., :1].isfinite()
    alike = torch.equal(chosen.where(is_finite, 0), values.where(is_finite, 0))
    return alike and torch.allclose(probs, values.softmax(-1).nan_to_num(), atol=1e-6)
