"""Steps of a head on a CPU that has the kernel: a level of a tree is three calls, for layers, ranking and growth.

The reference is `PlainSteps`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_speculate.drafting import DraftState
from hf_speculate.gguf import NativeGrowth, Sampling, tree_rows
from hf_speculate.tree import DraftTree

from ..heads import Reading
from .checkpoint import LoadedHead
from .native import NativeForward
from .options import TreeSize
from .steps import PlainSteps, parent_states


class NativeSteps(PlainSteps):
    """`PlainSteps` whose dynamic trees are drawn natively, as far as the kernel computes what a request asks for."""

    def __init__(self, loaded: LoadedHead, reading: Reading, native: NativeForward):
        super().__init__(loaded, reading, native)
        self._forward = native

    def tree(self, root: Tensor, state: DraftState, size: TreeSize) -> DraftTree:
        tree = self._native_tree(root, state, size)
        return super().tree(root, state, size) if tree is None else tree

    @torch.no_grad()
    def _native_tree(self, root: Tensor, state: DraftState, size: TreeSize) -> DraftTree | None:
        """None, and no entry changed, where the modules are to draw it."""
        forward, reading, target_ids = self._forward, self._reading, self._loaded.target_ids
        layers, ranking = forward.current_layers(), forward.current_ranking()
        sampling = Sampling.of(state.warpers if state.samples else ())
        if layers is None or ranking is None or sampling is None:
            return None
        noise = self._noise(state, 0, ranking.num_columns)
        width = min(size.width, ranking.num_columns if noise is None else noise.shape[-1])
        rows = tree_rows(layers, root, reading.cache.cache, (width, size.depth), reading.visible())
        if rows is None:
            return None
        growth = NativeGrowth(len(root), width, size.depth, target_ids)
        ranked = ranking.run(root[:, None].contiguous(), width, noise, sampling)
        for level in range(1, size.depth + 1):
            if ranked is None:
                return None
            growth.extend(ranked.shares, ranked.columns)
            if level == size.depth or not state.goes_on(growth.values, growth.previous):
                break
            states, beside = forward.inputs(growth.tokens, parent_states(ranked.fed_back, growth.previous))
            positions = reading.positions_at(torch.full((1, 1), level - 1)).expand(-1, width)
            hidden = rows.run(growth, states, forward.rotary(states, positions), beside)[-1]
            ranked = ranking.run(hidden, width, self._noise(state, level, ranking.num_columns), sampling)
        tokens, parents, values = growth.best(state.root_ids, size.max_nodes)
        return DraftTree(tokens, parents, max_depth=growth.num_levels, values=values)

    def _noise(self, state: DraftState, depth: int, num_columns: int) -> Tensor | None:
        """float32 [B, C], contiguous; None for a greedy request."""
        noise = state.log_noise((depth,), num_columns, self._loaded.target_ids)
        return None if noise is None else noise[:, 0].float().contiguous()
