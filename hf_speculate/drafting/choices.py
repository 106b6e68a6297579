"""What the target found probable at the nodes of a round: more than the token that was chosen there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..tree import DraftTree, HostTree
from .ranking import Warpers, warped


_BLOCK = 64


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
        values, token_ids = _largest(warped(logits, warpers), min(count, logits.shape[-1]))
        probs = values.softmax(-1).nan_to_num()  # where logits are not finite, nothing is probable
        return cls(tree.rows, tree.host, token_ids.cpu(), probs.cpu())

    def first(self, count: int) -> Choices:
        """The `count` most probable ones."""
        probs = self.probs[..., :count]
        probs = (probs / probs.sum(-1, keepdim=True)).nan_to_num()
        return Choices(self.rows, self.tree, self.token_ids[..., :count], probs)


def _largest(scores: Float[Tensor, "R N V"], count: int) -> tuple[Tensor, Tensor]:
    """`scores.topk(count)`, three to five times as fast on a CPU: the largest are in the blocks of largest maxima."""
    num_blocks = scores.shape[-1] // _BLOCK
    if num_blocks <= count:
        return scores.topk(count)
    whole = num_blocks * _BLOCK
    blocks = scores[..., :whole].unflatten(-1, (num_blocks, _BLOCK))
    chosen = blocks.amax(-1).topk(count).indices
    places = (chosen[..., None] * _BLOCK + torch.arange(_BLOCK, device=scores.device)).flatten(-2)
    rest = torch.arange(whole, scores.shape[-1], device=scores.device).expand(*scores.shape[:-1], -1)
    places = torch.cat([places, rest], dim=-1)
    values, found = scores.gather(-1, places).topk(count)
    return values, places.gather(-1, found)
