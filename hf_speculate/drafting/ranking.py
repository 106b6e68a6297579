"""The ranking of the children of nodes by a drafter's logits, as a function of tensors: it can be a part of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


Warpers = Sequence[Callable[..., Any]]
"""Processors that see only scores; they are called with no text."""

# Of logits: beyond all that models give, and finite at any temperature.
_UNLIKELY = 1e4


def rank_children(
    draft_logits: Float[Tensor, "B N W"], log_noise: Float[Tensor, "B C"] | None, warpers: Warpers
) -> Float[Tensor, "B N C"]:
    """The scores that `DraftState.child_scores` returns.

    Args:
        log_noise: log of the noise that the target will use at these children, for the first C <= W columns; None for a
            greedy request, whose scores are the logits.
        warpers: of the request.
    """
    if log_noise is None:
        return draft_logits
    return warped(draft_logits, warpers)[..., : log_noise.shape[-1]] - log_noise[:, None]


def warped(logits: Float[Tensor, "B N V"], warpers: Warpers) -> Float[Tensor, "B N V"]:
    """Logits after the warpers, float32. Some raise for NaN, which a token that nobody trained may lead to."""
    scores: Any = logits.float().flatten(0, 1)
    if warpers:
        scores = scores.nan_to_num(nan=-_UNLIKELY, posinf=_UNLIKELY, neginf=-torch.inf)
    for warper in warpers:
        scores = warper(None, scores)
    return scores.view(logits.shape)
