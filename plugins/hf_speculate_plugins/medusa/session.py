"""One request of Medusa heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_speculate.compilation import Buffers, SetKey, pool_of
from hf_speculate.drafting import DraftRequest, DraftSession, DraftState
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree

from .choices import StaticTree, column_index, static_tree
from .heads import MedusaHeads


if TYPE_CHECKING:
    from .drafter import MedusaDrafter


def medusa_logits(heads: MedusaHeads, lm_head: nn.Module | None, features: Tensor) -> Tensor:
    return heads(features, lm_head)


class MedusaSession(DraftSession):
    """Keeps one hidden state a row: the one that the newest token was chosen from."""

    def __init__(self, drafter: MedusaDrafter, request: DraftRequest):
        self.heads = drafter.heads
        self.tree = drafter.tree
        self._layer = drafter.feature_layers[0]
        # Asked for here and not kept in the drafter, which would keep the target alive.
        self._lm_head = request.target.get_output_embeddings() if drafter.heads.output_weight is None else None
        self._features: Tensor | None = None  # [B, H]
        self._compiler = request.compiler
        outputs = drafter.heads.output_weight
        has_many = outputs is not None and len(outputs) > 1
        if self._compiler and self._compiler.backend == "inductor" and has_many and drafter.heads.device.type == "cpu":
            self._compiler.refuse("Medusa heads with matrices of their own take longer compiled by inductor on a CPU")
            self._compiler = None
        self._buffers: dict[SetKey, Buffers] = {}

    def observe(self, tokens, features, lengths) -> None:
        states = features[self._layer]
        # Rows that have ended keep a state that nobody uses.
        last = to_device((lengths - 1).clamp(min=0), states.device)
        rows = torch.arange(len(states), device=states.device)
        self._features = states[rows, last].to(self.heads.device, self.heads.dtype)

    def draft(self, state: DraftState) -> DraftTree:
        tree = self._chain if state.chains_only else self.tree
        tree = tree.to_depth(state.max_depth)
        if not tree.max_depth or self._features is None:
            return DraftTree.root_only(state.root_ids)
        best = self._best_tokens(state, tree)
        columns = column_index(tree, best.device)
        roots = to_device(state.root_ids, best.device)
        return DraftTree(torch.cat([roots[:, None], best[:, columns]], dim=1), tree.parents)

    @property
    def _chain(self) -> StaticTree:
        """The best token of every head, for targets that cannot score branches."""
        return static_tree(tuple((0,) * depth for depth in range(1, self.heads.num_heads + 1)))

    def _best_tokens(self, state: DraftState, tree: StaticTree) -> Tensor:
        """int64 [B, sum of widths]: as many of each head's tokens as the tree uses, best first."""
        token_ids = self.heads.token_ids
        logits = self._logits(tree.max_depth)
        best = []
        for depth, width in enumerate(tree.widths):
            scores = state.child_scores(logits[depth][:, None], depth=depth, token_ids=token_ids)
            best.append(scores[:, 0].topk(width, dim=-1).indices)
        columns = torch.cat(best, dim=1)
        return columns if token_ids is None else token_ids[columns]

    def _logits(self, num_heads: int) -> Tensor:
        """[D, B, Vd] of the first `num_heads` heads. Compiled, all heads run: their number is a part of the shape."""
        heads, features = self.heads, self._features
        assert features is not None

        def plain() -> Tensor:
            return heads(features, self._lm_head, num_heads=num_heads)

        if self._compiler is None:
            return plain()
        set_key = (len(features), 0)
        if set_key not in self._buffers:
            self._buffers[set_key] = pool_of(heads).take(set_key)

        def inputs() -> tuple[Any, ...]:
            return heads, self._lm_head, self._buffers[set_key].filled("features", features)

        key = (len(features), heads.dtype)
        return self._compiler.run(heads, heads.device, key, medusa_logits, inputs, plain)[:num_heads]

    def close(self) -> None:
        pool_of(self.heads).put_back(self._buffers)
        self._buffers = {}
