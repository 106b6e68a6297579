"""One request of Medusa heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hf_speculate.drafting import DraftSession, DraftState
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree

from ..trees import StaticTree, log_shares, path_sums
from .choices import column_index
from .compiled import Forward
from .head import MedusaHeads


class MedusaSession(DraftSession):
    """Keeps one hidden state a row: the one that the newest token was chosen from.

    Args:
        heads: the heads.
        tree: the static tree that their best tokens fill.
        layer: the key by which `observe` is given the features that the heads read.
        forward: runs the heads of this request.
    """

    def __init__(self, heads: MedusaHeads, tree: StaticTree, layer: int, forward: Forward):
        self.heads, self.tree, self._layer, self._forward = heads, tree, layer, forward
        self._features: Tensor | None = None  # [B, H]

    def observe(self, tokens, features, lengths) -> None:
        states = features[self._layer]
        # Rows that have ended keep a state that nobody uses.
        last = to_device((lengths - 1).clamp(min=0), states.device)
        rows = torch.arange(len(states), device=states.device)
        self._features = states[rows, last].to(self.heads.device, self.heads.dtype)

    def draft(self, state: DraftState) -> DraftTree:
        tree = self._chain if state.chains_only else self.tree
        tree = tree.cut(state.max_depth)
        if not tree.max_depth or self._features is None:
            return DraftTree.root_only(state.root_ids)
        shares, best = self._best_tokens(state, tree, self._features)
        columns = column_index(tree, best.device)
        roots = to_device(state.root_ids, best.device)
        tokens = torch.cat([roots[:, None], best[:, columns]], dim=1)
        # The heads know nothing of each other's tokens: what they say of a path's multiplies.
        values = functional.pad(shares[:, columns], (1, 0)) @ path_sums(tree, best.device)
        return DraftTree(tokens, tree.parents, values=values)

    @property
    def _chain(self) -> StaticTree:
        """The best token of every head, for targets that cannot score branches."""
        return StaticTree(tuple((0,) * depth for depth in range(1, self.heads.num_heads + 1)))

    def _best_tokens(self, state: DraftState, tree: StaticTree, features: Tensor) -> tuple[Tensor, Tensor]:
        """As many of each head's tokens as the tree uses, best first: int64 [B, sum of widths]; and the
        log-probabilities that the heads give them."""
        token_ids = self.heads.token_ids
        logits = self._forward(features, tree.max_depth)
        best, shares = [], []
        for depth, width in enumerate(tree.widths):
            scores = state.child_scores(logits[depth][:, None], depth=depth, token_ids=token_ids)
            for found, part in zip((shares, best), log_shares(scores[:, 0], width), strict=True):
                found.append(part)
        columns = torch.cat(best, dim=1)
        return torch.cat(shares, dim=1), columns if token_ids is None else token_ids[columns]

    def close(self) -> None:
        self._forward.close()
