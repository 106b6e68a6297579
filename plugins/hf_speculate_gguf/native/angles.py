"""Cosines and sines of positions from transformers' rotary embeddings, kept between forwards."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


# Types of RoPE whose angles depend only on the position.
FIXED_ROPE = ("default", "linear", "llama3", "yarn")


class AngleTable:
    """Cosines and sines of all positions up to the longest one asked for."""

    def __init__(self) -> None:
        self._made_of: tuple[Any, ...] = ()
        self._table: tuple[Tensor, Tensor] | None = None

    def upto(
        self, rotary: Any, needed: int, dtype: torch.dtype, layer_type: str | None = None
    ) -> tuple[Float[Tensor, "P D"], Float[Tensor, "P D"]]:
        """Contiguous angles of at least `needed` positions. They are computed again if the frequencies have changed.

        Args:
            rotary: rotary embedding module of a type in `FIXED_ROPE`.
            layer_type: type of the layers, for a module with frequencies for each.
        """
        prefix, named = ("", ()) if layer_type is None else (f"{layer_type}_", (layer_type,))
        frequencies, scaling = (getattr(rotary, f"{prefix}{name}") for name in ("inv_freq", "attention_scaling"))
        version = None if frequencies.is_inference() else frequencies._version
        made_of = id(frequencies), frequencies.data_ptr(), version, scaling, dtype
        if self._table is None or self._made_of != made_of or len(self._table[0]) < needed:
            with torch.no_grad():
                cos, sin = rotary(torch.empty(0, dtype=dtype), torch.arange(max(2 * needed, 1024))[None], *named)
            self._table, self._made_of = (cos[0].contiguous(), sin[0].contiguous()), made_of
        return self._table
