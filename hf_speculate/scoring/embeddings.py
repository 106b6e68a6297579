"""Rows of a target's embeddings and output matrix in any form: plain, packed, quantised, adapted, offloaded.

A matrix that cannot be read is computed: an embedding from its tokens, a linear layer from unit vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


# Number of columns of an output matrix, and of embedding rows, computed at once.
_UNITS, _TOKENS = 64, 4096


def is_dense(module: Any) -> bool:
    """Whether a module is an ordinary linear layer: not quantised, adapted or offloaded."""
    weight = getattr(module, "weight", None)
    if type(module) is not nn.Linear or weight is None or weight.device.type == "meta":
        return False
    return weight.is_floating_point() and weight.ndim == 2


@torch.no_grad()
def output_rows(
    module: Any, hidden_size: int, dtype: torch.dtype, ids: Int[Tensor, " N"] | None = None
) -> Float[Tensor, "N H"]:
    """Rows of an output layer's matrix by token, without its bias; None gives all rows.

    Args:
        dtype: dtype of the states that the layer takes. Rows that must be computed have this dtype; others keep their
            own.
    """
    if is_dense(module):
        return module.weight if ids is None else module.weight[ids.to(module.weight.device)]
    device = module.weight.device
    units = torch.eye(hidden_size, dtype=dtype, device="cpu" if device.type == "meta" else device)
    constant = module(torch.zeros_like(units[:1]))
    chosen = slice(None) if ids is None else ids.to(constant.device)
    columns = [(module(block) - constant)[:, chosen] for block in units.split(_UNITS)]
    return torch.cat(columns).T


@torch.no_grad()
def embedding_rows(module: Any, vocab_size: int) -> Float[Tensor, "V H"]:
    """All rows of an embedding."""
    device = module.weight.device
    if isinstance(module, nn.Embedding) and device.type != "meta" and module.weight.is_floating_point():
        return module.weight
    ids = torch.arange(vocab_size, device="cpu" if device.type == "meta" else device)
    return torch.cat([module(block) for block in ids.split(_TOKENS)])
