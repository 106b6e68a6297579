"""The entries of the text that new tokens see: which are padding, holes or beyond a row's end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..transfers import to_device


def prompt_starts(prompt_mask: Tensor | None, num_rows: int) -> list[int] | None:
    """Index of the first real entry of each row of a prompt (bool [B, P]); None if other entries are missing, too."""
    if prompt_mask is None:
        return [0] * num_rows
    starts = num_left_padding(prompt_mask, prompt_mask.device)
    is_plain = bool((prompt_mask.sum(-1, keepdim=True) + starts == prompt_mask.shape[1]).all())
    return starts[:, 0].tolist() if is_plain else None


def num_left_padding(prompt_mask: Tensor | None, device: torch.device) -> Tensor:
    """int64 [B, 1], number of entries before the first real one of every row; [1, 1] without a mask."""
    if prompt_mask is None:
        return torch.zeros(1, 1, dtype=torch.long, device=device)
    return (prompt_mask.cumsum(-1) == 0).sum(-1, keepdim=True).to(device)


def visible_prefix(
    lengths: Sequence[int], prompt_mask: Tensor | None, num_entries: int, device: torch.device
) -> Tensor:
    """A mask of the real entries among the first `num_entries` of a cache.

    Args:
        lengths: number of committed entries of each row.
        prompt_mask: bool [R, M0], False for left padding and holes among the first M0 entries; None when all are real.
        num_entries: number of entries, M.

    Returns:
        bool [R, M] on `device`.
    """
    visible = torch.arange(num_entries, device=device, dtype=torch.long) < to_device(lengths, device)[:, None]
    if prompt_mask is not None:
        width = min(prompt_mask.shape[1], num_entries)
        visible[:, :width] &= to_device(prompt_mask[:, :width], device)
    return visible


def prefix_mask(
    lengths: Sequence[int], prompt_mask: Tensor | None, num_entries: int, device: torch.device
) -> Tensor | None:
    """`visible_prefix` of a cache whose longest row has `num_entries` entries; None if all of them are real."""
    if prompt_mask is None and min(lengths) == max(lengths):
        return None
    return visible_prefix(lengths, prompt_mask, num_entries, device)
