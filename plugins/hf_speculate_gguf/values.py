"""Values of tensors of any type that can be read: as they are stored, or dequantised."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from .native import DENSE_TYPES, FORMATS, dense_values


def values_of(rows: UInt8[Tensor, "R bytes"], kind: str) -> Float[Tensor, "R K"]:
    """The values of rows of a type in `known_types`: in their own type if they are not quantised, else in float32."""
    if kind in DENSE_TYPES:
        return dense_values(rows, kind)
    if kind in FORMATS:
        return FORMATS[kind].dequantize(rows)
    import gguf

    return torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))


@cache
def known_types() -> tuple[str, ...]:
    """Types of matrices that can be loaded. Those beyond `FORMATS` and `DENSE_TYPES` cannot stay packed."""
    import gguf

    others = [kind for kind in gguf.GGMLQuantizationType if kind.name not in (*FORMATS, *DENSE_TYPES)]
    return (*DENSE_TYPES, *FORMATS, *(kind.name for kind in others if _is_readable(gguf, kind)))


def _is_readable(gguf: Any, kind: Any) -> bool:
    """Whether the `gguf` package dequantises a type. The only test is to do so."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
