"""How the noise of sampled requests is drawn on CPUs: by torch, or several times faster where something else does the
same.

torch draws one value after the other, 20 ns each: for a vocabulary of 150,000 that is 3 ms a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


Draw = Callable[[Tensor, Tensor], None]
"""(state, values): fills contiguous float32 values as `exponential_` does with a generator of the CPU in this state
(uint8, from `Generator.get_state`), and moves the state on."""

_others: list[Draw] = []


def draw_by(draw: Draw) -> bool:
    """From now on noise is drawn so, if values and states are torch's to the last bit; whether they are."""
    is_same = all(_is_same(draw, num_before, count) for num_before, count in ((0, 5), (1, 4099), (0, 1 << 14)))
    if is_same:
        _others[:] = [draw]
    return is_same


def _is_same(draw: Draw, num_before: int, count: int) -> bool:
    generator = torch.Generator().manual_seed(num_before + count)
    torch.empty(num_before, dtype=torch.long).random_(100, generator=generator)
    state, found = generator.get_state(), torch.empty(count)
    draw(state, found)
    wanted = torch.empty(count).exponential_(generator=generator)
    return torch.equal(found, wanted) and torch.equal(state, generator.get_state())


def exponential(values: Tensor, generator: torch.Generator) -> Tensor:
    """`values.exponential_(generator=generator)` of new float32 values."""
    if not _others or not values.is_cpu:
        return values.exponential_(generator=generator)
    state = generator.get_state()
    _others[0](state, values)
    generator.set_state(state)
    return values
