"""One request of an EAGLE head: what it was told, and the trees that it draws from what it has read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_speculate.drafting import Conversations, DraftRequest, DraftSession, DraftState
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree, TreePlan

from ..heads import Reading, problem_with_head
from ..trees import StaticTree, best_tree, log_shares, path_sums, slot_scores, slot_shares, trimmed
from .checkpoint import LoadedHead
from .compiled import CompiledSteps
from .levels import Level, forest_of, levels_of
from .options import EagleOptions, TreeSize
from .steps import Pending, PlainSteps, Steps, read_prompt


if TYPE_CHECKING:
    from .native import NativeForward


Turn = tuple[Reading, Pending | None]
"""What one turn of a conversation leaves for the next."""


class EagleSession(DraftSession):
    """Drafts for one request.

    What a round committed is read in the forward that also expands the root of the next tree: entry i pairs the feature
    at token i with token i + 1, so the last new entry belongs to the root and its output ranks the root's children.

    Args:
        loaded: the head.
        layers: for every feature that it takes, the key by which `observe` is given it.
        options: how much is drafted.
        conversations: where earlier turns are found, and this one is left.
        request: what is to be drafted for.
        native: see `PlainSteps`.
    """

    def __init__(
        self,
        loaded: LoadedHead,
        layers: Sequence[int],
        options: EagleOptions,
        conversations: Conversations[Turn],
        request: DraftRequest,
        native: NativeForward | None = None,
    ):
        self.options = options
        self._loaded, self._layers = loaded, layers
        self._request, self._conversations, self._native = request, conversations, native
        self._text = request.carried_text
        self.carries_over = self._text is not None
        self._compiler = request.compiler
        if self._compiler is not None and (problem := problem_with_head(loaded.head)):
            self._compiler.refuse(problem)
            self._compiler = None
        self._reading: Reading | None = None
        self._steps: Steps | None = None
        self._pending: Pending | None = None
        self._root_hidden: Tensor | None = None

    def observe(self, tokens: Tensor, features: Mapping[int, Tensor], lengths: Tensor) -> None:
        head, states = self._loaded.head, [features[layer] for layer in self._layers]
        if self._text is not None:
            # Of the prompt's tokens only the last is new, see `DraftSession.observe`.
            self._text += tokens[0, -1:].tolist() if self._reading is None else tokens[0, : int(lengths[0])].tolist()
        if self._reading is None:
            num_rows, count = tokens.shape
            self._reading = Reading.begin(
                head, self._request, (num_rows, count), lambda first: self._resumed(first, count)
            )
            self._steps = self._steps_behind(self._reading)
            self._root_hidden = read_prompt(head, self._reading, tokens, head.fuse(states), self._native)
            return
        self._read_pending()
        self._pending = (tokens, states, lengths.tolist())

    def draft(self, state: DraftState) -> DraftTree:
        reading, steps, options = self._reading, self._steps, self.options
        if reading is None or steps is None:
            raise RuntimeError("draft() before the first observe()")
        try:
            if self._loaded.spec.parallel:
                return self._draft_parallel(state, steps, self._root())
            if options.static_tree is not None and not state.chains_only:
                return self._draft_static(state, steps, self._root(), options.static_tree.cut(state.max_depth))
            return self._draft_dynamic(state, steps)
        finally:
            reading.drop()

    def close(self) -> None:
        """Leaves what was read, and what is yet to be read, to the next turn."""
        if self._reading is not None and self._text is not None and self._request.cache is not None:
            self._conversations.keep(self._request.cache, self._text, (self._reading, self._pending))
        self._reading = self._steps = self._pending = self._root_hidden = None

    def _steps_behind(self, reading: Reading) -> Steps:
        native = self._native
        is_dynamic = self.options.static_tree is None and not self._loaded.spec.parallel
        if native is not None and is_dynamic and not reading.has_windows and native.current_ranking() is not None:
            from .native_steps import NativeSteps  # which the session of a head without a kernel need not know

            return NativeSteps(self._loaded, reading, native)  # not compiled: graphs of trees are slower
        plain = PlainSteps(self._loaded, reading, native)
        if self._compiler is None:
            return plain
        return CompiledSteps(plain, self._loaded, reading, self.options, self._compiler)

    def _resumed(self, first: int, count: int) -> Reading | None:
        """The last turn's reading, if it read all entries before `first` as the text now has them. (The last of them
        pairs a feature of that turn with the first token of this one.)"""
        carried = self._conversations.take(self._request.cache, self._text)
        if carried is None or first == 0:
            return None
        num_alike, (reading, pending) = carried
        if pending is not None:
            self._read(self._steps_behind(reading), reading, pending)
        return reading.resumed(first, count) if num_alike > first else None

    def _read_pending(self) -> None:
        if self._reading is None or self._steps is None or self._pending is None:
            return
        pending, self._pending = self._pending, None
        hidden, lengths = self._read(self._steps, self._reading, pending), pending[2]
        if 0 in lengths and self._root_hidden is not None:  # rows that have ended keep their root
            is_new = to_device(lengths, hidden.device)[:, None] > 0
            hidden = torch.where(is_new, hidden, self._root_hidden)
        self._root_hidden = hidden

    @torch.no_grad()
    def _read(self, steps: Steps, reading: Reading, pending: Pending) -> Tensor:
        """Commits what is pending; the states of the last entry of every row [B, Hd]."""
        token_ids, features, lengths = pending
        hidden = steps.entries(token_ids, self._loaded.head.fuse(features))
        reading.keep(lengths)
        last = to_device([max(length, 1) - 1 for length in lengths], hidden.device)
        return hidden[torch.arange(len(lengths), device=hidden.device), last]

    def _root(self) -> Tensor:
        """States of the entry committed last, after everything pending was read."""
        self._read_pending()
        assert self._root_hidden is not None
        return self._root_hidden

    def _scores(self, state: DraftState, depth: int, logits: Tensor) -> Tensor:
        """By which the children of nodes at `depth` are ranked [B, n, Vd]."""
        return state.child_scores(logits, depth, self._loaded.target_ids)

    def _to_target(self, columns: Tensor) -> Tensor:
        target_ids = self._loaded.target_ids
        return columns if target_ids is None else target_ids[columns]

    def _draft_dynamic(self, state: DraftState, steps: Steps) -> DraftTree:
        """A tree, or where only chains can be verified the best chain."""
        options, depth = self.options, min(self.options.max_depth, state.max_depth)
        if not depth:
            return DraftTree.root_only(state.root_ids)
        width = options.width(state.samples)
        if width > 1 and not state.chains_only:
            return self._tree(state, steps, TreeSize(depth, width, options.max_nodes))
        # The most nodes that a chain may have, not those of this round, which would be another graph.
        chain = self._tree(state, steps, TreeSize(depth, 1, options.max_depth))
        return DraftTree.chain(chain.token_ids, chain.values)

    def _tree(self, state: DraftState, steps: Steps, size: TreeSize) -> DraftTree:
        drawn = None if self._pending is None else steps.tree_behind(self._pending, state, size)
        if drawn is None:
            return steps.tree(self._root(), state, size)
        tree, self._root_hidden = drawn
        self._pending = None
        return tree

    @cached_property
    def _mask(self) -> tuple[Tensor, Tensor]:
        """What stands for every deeper token of a P-EAGLE draft; a projection as large as a target's layer's."""
        return self._loaded.head.masks(1, 1)

    @torch.no_grad()
    def _draft_parallel(self, state: DraftState, steps: Steps, root: Tensor) -> DraftTree:
        """The best tree of what the last entry and the masks behind it propose: two forwards of any depth."""
        head, options, target_ids = self._loaded.head, self.options, self._loaded.target_ids
        depth = min(options.depth, state.max_depth)
        if not depth:
            return DraftTree.root_only(state.root_ids)
        logits, _ = head.read(root[:, None])
        if depth > 1:
            plan = TreePlan.from_parents([range(-1, depth - 2)])
            token_ids, states = (mask.expand(len(root), depth - 1, *mask.shape[2:]) for mask in self._mask)
            logits = torch.cat([logits, steps.level(token_ids, states, plan)[0]], dim=1)
        noise = state.log_noise(range(logits.shape[1]), logits.shape[-1], target_ids)
        scores = slot_scores(logits, noise, state.warpers)
        shares_of = slot_shares(scores, target_ids, 1 if state.chains_only else options.width(state.samples))
        roots = to_device(state.root_ids, root.device)
        return trimmed(best_tree(roots, shares_of, depth=depth, max_nodes=options.max_nodes), state.active)

    def _draft_static(self, state: DraftState, steps: Steps, root: Tensor, tree: StaticTree) -> DraftTree:
        tokens = torch.zeros(len(state.root_ids), len(tree.parents), dtype=torch.long, device=root.device)
        tokens[:, 0] = to_device(state.root_ids, tokens.device)
        own_values = torch.zeros(tokens.shape, device=root.device)
        logits, fed_back = self._loaded.head.read(root[:, None])
        run: tuple[int, ...] = ()
        for depth, level in enumerate(levels_of(tree)):
            if depth:
                run += level.nodes
                nodes = tokens[:, to_device(level.nodes, tokens.device)]
                states = fed_back[:, to_device(level.previous, fed_back.device)]
                logits, fed_back = steps.level(nodes, states, forest_of(tree, run))
            self._fill(tokens, own_values, level, self._scores(state, depth, logits))
        return DraftTree(tokens, tree.parents, values=own_values @ path_sums(tree, root.device))

    def _fill(self, tokens: Tensor, own_values: Tensor, level: Level, scores: Tensor) -> None:
        """Writes the children of a level: the best-ranked tokens of its nodes."""
        shares, columns = log_shares(scores, max(level.child_ranks) + 1)
        parents, ranks, children = (
            to_device(indices, tokens.device) for indices in (level.child_parents, level.child_ranks, level.children)
        )
        tokens[:, children] = self._to_target(columns[:, parents, ranks])
        own_values[:, children] = shares[:, parents, ranks]
