"""Steps of a head on a CPU that has the kernel: a draft is one call, which also reads what was committed before it.

Drafts of EAGLE-1, which projects embeddings and states together, take three calls a level: for layers, ranking and
growth. They are the reference of the one call; theirs is `PlainSteps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hf_speculate.drafting import DraftState
from hf_speculate.gguf import NativeDraft, NativeGrowth, NativeRanking, Sampling, TreeRows, Unread, tree_rows
from hf_speculate.tree import DraftTree

from ..heads import Reading
from .checkpoint import LoadedHead
from .native import NativeForward
from .options import TreeSize
from .steps import Pending, PlainSteps, parent_states


NoiseOf = Callable[[int], Tensor | None]
"""float32 [B, C], contiguous, of a level; None for a greedy request."""


class NativeSteps(PlainSteps):
    """`PlainSteps` whose dynamic trees are drawn natively, as far as the kernel computes what a request asks for."""

    def __init__(self, loaded: LoadedHead, reading: Reading, native: NativeForward):
        super().__init__(loaded, reading, native)
        self._forward = native

    def tree(self, root: Tensor, state: DraftState, size: TreeSize) -> DraftTree:
        tree = self._native_tree(root.contiguous(), None, state, size)
        return super().tree(root, state, size) if tree is None else tree

    def tree_behind(self, pending: Pending, state: DraftState, size: TreeSize) -> tuple[DraftTree, Tensor] | None:
        token_ids, features, lengths = pending
        has_holes = set(lengths) != {token_ids.shape[1]} or self._reading.visible() is not None
        if has_holes or not self._forward.is_one_call:
            return None
        head = self._loaded.head
        root = torch.empty(len(token_ids), head.spec.hidden_size, dtype=head.dtype)
        tree = self._native_tree(root, self._forward.unread(token_ids, features), state, size)
        if tree is None:
            return None
        self._reading.keep(lengths)
        return tree, root

    @torch.no_grad()
    def _native_tree(self, root: Tensor, unread: Unread | None, state: DraftState, size: TreeSize) -> DraftTree | None:
        """None, and no committed entry changed, where the modules are to draw it.

        Args:
            root: states of the entry committed last; found, where something is to be read.
            unread: the one call reads it first.
        """
        forward, reading = self._forward, self._reading
        layers, ranking = forward.current_layers(), forward.current_ranking()
        sampling = Sampling.of(state.warpers if state.samples else ())
        if layers is None or ranking is None or sampling is None:
            return None

        @cache  # the first level's is asked for its width, too
        def noise(depth: int) -> Tensor | None:
            found = state.log_noise((depth,), ranking.num_columns, self._loaded.target_ids)
            return None if found is None else found[:, 0].float().contiguous()

        first = noise(0)
        width = min(size.width, ranking.num_columns if first is None else first.shape[-1])
        num_pending = 0 if unread is None else unread.tokens.shape[1]
        rows = tree_rows(layers, root, reading.cache.cache, (width, size.depth), reading.visible(), num_pending)
        if rows is None:
            return None
        growth = NativeGrowth(len(root), width, size.depth, self._loaded.target_ids)
        grow = Growing(forward, reading, rows, ranking, sampling, noise, state)
        if not (grow.at_once(growth, root, unread) if forward.is_one_call else grow.by_levels(growth, root)):
            return None
        tokens, parents, values = growth.best(state.root_ids, size.max_nodes)
        return DraftTree(tokens, parents, max_depth=growth.num_levels, values=values)


@dataclass(frozen=True)
class Growing:
    """How the kernel grows the trees of one draft. Both ways: whether it did; if not, no committed entry changed.

    Attributes:
        sampling, noise: of the request.
        state: is asked whether to go on.
    """

    forward: NativeForward
    reading: Reading
    rows: TreeRows
    ranking: NativeRanking
    sampling: Sampling
    noise: NoiseOf
    state: DraftState

    def at_once(self, growth: NativeGrowth, root: Tensor, unread: Unread | None) -> bool:
        """In one call."""
        starts, num_pending = self.reading.next_positions(), 0 if unread is None else unread.tokens.shape[1]
        angles = self.forward.angles(root, max(starts) + num_pending + growth.depth)
        draft = NativeDraft(self.rows, self.ranking, self.forward.embeddings, angles)
        return draft.grow(
            growth,
            root,
            unread,
            torch.tensor(starts),
            self.sampling,
            self.noise,
            lambda: self.state.goes_on(growth.values, growth.previous),
        )

    def by_levels(self, growth: NativeGrowth, root: Tensor) -> bool:
        """In three calls a level: for layers, ranking and growth."""
        width = growth.tokens.shape[1]
        ranked = self.ranking.run(root[:, None].contiguous(), width, self.noise(0), self.sampling)
        for level in range(1, growth.depth + 1):
            if ranked is None:
                return False
            growth.extend(ranked.shares, ranked.columns)
            if level == growth.depth or not self.state.goes_on(growth.values, growth.previous):
                break
            states, beside = self.forward.inputs(growth.tokens, parent_states(ranked.fed_back, growth.previous))
            positions = self.reading.positions_at(torch.full((1, 1), level - 1)).expand(-1, width)
            hidden = self.rows.run(growth, states, self.forward.rotary(states, positions), beside)[-1]
            ranked = self.ranking.run(hidden, width, self.noise(level), self.sampling)
        return True
