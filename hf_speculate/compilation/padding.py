"""Inputs of any number of tokens, padded to a static one."""

from __future__ import annotations

import torch
from torch import Tensor


def padded(inputs: Tensor, width: int) -> Tensor:
    """[B, width, ...] of [B, N, ...]. Padding is copies of the first entry: what it writes is as finite as that."""
    missing = width - inputs.shape[1]
    return torch.cat([inputs, inputs[:, :1].expand(-1, missing, *inputs.shape[2:])], dim=1) if missing else inputs


def padded_mask(mask: Tensor | None, like: Tensor, num_seen: int, width: int, capacity: int) -> Tensor:
    """Additive [B, 1, width, capacity]; padding sees what the first entry sees.

    Args:
        mask: additive [B or 1, 1, N, num_seen]; None: everything is seen.
        like: [B, N, ...], of the mask's device; its dtype is the result's.
        num_seen: entries of the cache and the N new ones.
    """
    batch_size, count = like.shape[:2]
    full = like.new_full((batch_size, 1, width, capacity), torch.finfo(like.dtype).min)
    full[:, :, :count, :num_seen] = 0 if mask is None else mask
    full[:, :, count:] = full[:, :, :1]
    return full
