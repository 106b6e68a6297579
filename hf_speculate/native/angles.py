"""Cosines and sines of positions, as transformers' rotary embeddings make them, kept from forward to forward."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


# RoPE whose angles depend on nothing but the position.
FIXED_ROPE = ("default", "linear", "llama3", "yarn")


class AngleTable:
    """Those of all positions up to the longest that was asked for."""

    def __init__(self) -> None:
        self._made_of: tuple[Any, ...] = ()
        self._table: tuple[Tensor, Tensor] | None = None

    def upto(self, rotary: Any, needed: int, dtype: torch.dtype) -> tuple[Float[Tensor, "P D"], Float[Tensor, "P D"]]:
        """Angles of so many positions at least, contiguous; made anew where the frequencies have changed.

        Args:
            rotary: of a kind in `FIXED_ROPE`.
        """
        frequencies = rotary.inv_freq
        version = None if frequencies.is_inference() else frequencies._version
        made_of = id(frequencies), frequencies.data_ptr(), version, rotary.attention_scaling, dtype
        if self._table is None or self._made_of != made_of or len(self._table[0]) < needed:
            with torch.no_grad():
                cos, sin = rotary(torch.empty(0, dtype=dtype), torch.arange(max(2 * needed, 1024))[None])
            self._table, self._made_of = (cos[0].contiguous(), sin[0].contiguous()), made_of
        return self._table
