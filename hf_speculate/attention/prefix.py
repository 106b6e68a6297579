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


class PromptRows:
    """The mask of a prompt, for the rows that a cache holds.

    Args:
        mask: bool or int [B, P], False for left padding and holes; None when all entries are real.
        rows: indices of the rows that the cache holds now.
    """

    def __init__(self, mask: Tensor | None, rows: Sequence[int]):
        self._whole = None if mask is None else mask.bool()
        self._rows, self._mask = rows, self._whole
        self._starts: tuple[Tensor, Sequence[int] | None] | None = None  # a mask and its starts

    def mask(self, rows: Sequence[int]) -> Tensor | None:
        """bool [R, P] for these rows of the batch; None when all of their entries are real."""
        if self._rows is not rows and self._whole is not None:
            mask = self._whole[list(rows)]
            self._rows, self._mask = rows, None if mask.all() else mask
        return self._mask

    def starts(self, rows: Sequence[int]) -> Sequence[int] | None:
        """`prompt_starts` of these rows of the batch."""
        if (mask := self.mask(rows)) is None:
            return [0] * len(rows)
        if self._starts is None or self._starts[0] is not mask:
            self._starts = mask, prompt_starts(mask, len(mask))
        return self._starts[1]


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
