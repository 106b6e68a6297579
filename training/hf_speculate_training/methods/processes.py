"""Losses of processes that train together: what they are divided by has to be told among them."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, distributed


def shared_size(size: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """What each process divides its sums by, so that the mean of all losses is the loss of all rows together.

    DDP averages gradients as if every process had as much to learn from. Where sums are divided by counts of their own
    instead, a token counts more in a process that has few. One small all-reduce, where gradients are computed.

    Args:
        size: of this process; all call this with the same shape.
    Returns:
        The mean over the processes; `size` itself where there is one, or no gradient is wanted.
    """
    if not (distributed.is_available() and distributed.is_initialized() and torch.is_grad_enabled()):
        return size
    total = size.detach().clone()
    distributed.all_reduce(total)
    return total / distributed.get_world_size()
