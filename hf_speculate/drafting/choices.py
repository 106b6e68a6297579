"""The tokens that the target found probable at the nodes of a round, and the scores by which drafters rank tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..tree import DraftTree, HostTree
from ..verification import most_probable


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


@dataclass(frozen=True)
class Choices:
    """The target's most probable next tokens after every node that it scored in a round, accepted or not.

    Attributes:
        rows: of the batch; the others have one of these each.
        tree: the nodes.
        token_ids: int64 [R, N, K] on the CPU, most probable first.
        probs: float32 [R, N, K] on the CPU, among these K, after the request's temperature and cuts.
    """

    rows: Sequence[int]
    tree: HostTree
    token_ids: Int[Tensor, "R N K"]
    probs: Float[Tensor, "R N K"]

    @classmethod
    def of(cls, tree: DraftTree, logits: Float[Tensor, "R N V"], warpers: Warpers, count: int) -> Choices:
        """The first `count` ones; waits for the device."""
        scores = warped(logits, warpers) if warpers else logits
        probs, token_ids = most_probable(scores, min(count, logits.shape[-1]))
        return cls(tree.rows, tree.host, token_ids.cpu(), probs.cpu())

    def first(self, count: int) -> Choices:
        """The `count` most probable ones."""
        probs = self.probs[..., :count]
        probs = (probs / probs.sum(-1, keepdim=True)).nan_to_num()
        return Choices(self.rows, self.tree, self.token_ids[..., :count], probs)
