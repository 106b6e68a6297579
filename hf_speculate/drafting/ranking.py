"""The ranking of a node's children by a drafter's logits, as a function of tensors that can be compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


Warpers = Sequence[Callable[..., Any]]
"""Logits processors that see only scores; they are called without a text."""

# A bound for logits: larger than any model gives, and finite at any temperature.
_UNLIKELY = 1e4


def rank_children(
    draft_logits: Float[Tensor, "B N W"], log_noise: Float[Tensor, "B C"] | None, warpers: Warpers
) -> Float[Tensor, "B N C"]:
    """The scores that `DraftState.child_scores` returns.

    Args:
        log_noise: logarithm of the noise that the target will use at these children, for the first C <= W columns. None
            for a greedy request, whose scores are the logits.
        warpers: processors of the request that warp logits.
    """
    if log_noise is None:
        return draft_logits
    return warped(draft_logits, warpers)[..., : log_noise.shape[-1]] - log_noise[:, None]


def warped(logits: Float[Tensor, "B N V"], warpers: Warpers) -> Float[Tensor, "B N V"]:
    """Logits after the warpers, float32. NaN is replaced first, because some warpers raise for it."""
    scores: Any = logits.float().flatten(0, 1)
    if warpers:
        scores = scores.nan_to_num(nan=-_UNLIKELY, posinf=_UNLIKELY, neginf=-torch.inf)
    for warper in warpers:
        scores = warper(None, scores)
    return scores.view(logits.shape)
