"""The draft vocabulary: the tokens that a target emits most."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Int
from torch import Tensor

from ..data.batches import Batch


def count_tokens(batches: Iterable[Batch], vocab_size: int) -> Int[Tensor, " V"]:
    """How often each token is one that the target is to emit (`loss_mask`)."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for batch in batches:
        counts += torch.bincount(batch["input_ids"][batch["loss_mask"].bool()].cpu(), minlength=vocab_size)
    return counts


def draft_vocabulary(counts: Int[Tensor, " V"], size: int) -> Int[Tensor, " Vd"]:
    """The `size` most frequent tokens, ascending.

    Of tokens equally frequent (those that never occur, too) the lowest ids are taken, as SpecForge fills up.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"a draft vocabulary has 1 to {len(counts)} tokens, not {size}.")
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def coverage(counts: Int[Tensor, " V"], target_ids: Int[Tensor, " Vd"]) -> float:
    """Share of the counted tokens that a draft vocabulary has."""
    return float(counts[target_ids].sum() / counts.sum().clamp(min=1))
