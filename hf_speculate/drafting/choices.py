"""The target's most probable tokens at the nodes of a round, not only the chosen one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from ..tree import DraftTree, HostTree
from ..verification import most_probable
from .ranking import Warpers, warped


@dataclass(frozen=True)
class Choices:
    """The target's most probable next tokens after every node that it scored in a round, accepted or not.

    Attributes:
        rows: indices of the batch rows, one for each R.
        tree: scored tree of these rows.
        token_ids: int64 [R, N, K] on the CPU, most probable first.
        probs: float32 [R, N, K] on the CPU: probabilities among these K, after the request's temperature and cuts.
    """

    rows: Sequence[int]
    tree: HostTree
    token_ids: Int[Tensor, "R N K"]
    probs: Float[Tensor, "R N K"]

    @classmethod
    def of(cls, tree: DraftTree, logits: Float[Tensor, "R N V"], warpers: Warpers, count: int) -> Choices:
        """The `count` most probable tokens at every node. Waits for the device.

        The warpers see these tokens alone: over the whole vocabulary, at every node, they cost more than a draft.
        """
        probs, token_ids = most_probable(logits, min(count, logits.shape[-1]))
        if warpers:
            probs = warped(probs.log(), warpers).softmax(-1).nan_to_num()
        return cls(tree.rows, tree.host, token_ids.cpu(), probs.cpu())

    def first(self, count: int) -> Choices:
        """The same with only the `count` most probable tokens."""
        probs = self.probs[..., :count]
        probs = (probs / probs.sum(-1, keepdim=True)).nan_to_num()
        return Choices(self.rows, self.tree, self.token_ids[..., :count], probs)
