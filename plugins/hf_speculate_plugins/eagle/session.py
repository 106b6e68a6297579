"""One request of an EAGLE head: what it was told, what it has read, and the trees it draws from that."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_speculate.drafting import DraftRequest, DraftSession, DraftState
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree, TreePlan

from ..growth import Frontier, grow_tree
from .reading import Reading, Step
from .static import Level, StaticTree
from .steps import parent_states


if TYPE_CHECKING:
    from .drafter import EagleDrafter


class EagleSession(DraftSession):
    """Drafts for one request.

    What a round committed is read in the forward that also expands the root of the next tree: entry i pairs the feature
    at token i with token i + 1, so the last new entry belongs to the root and its output ranks the root's children.
    """

    def __init__(self, drafter: EagleDrafter, request: DraftRequest):
        self.options = drafter.options
        self.head, self.target_ids = drafter.head, drafter.target_ids
        self._layers = drafter.entry_layers
        self._request, self._conversations = request, drafter.conversations
        self._text = request.text
        self.carries_over = self._text is not None
        self._reading: Reading | None = None
        self._pending: tuple[Tensor, Tensor, list[int]] | None = None
        self._root_hidden: Tensor | None = None

    def observe(self, tokens: Tensor, features: Mapping[int, Tensor], lengths: Tensor) -> None:
        states = self.head.fuse([features[layer] for layer in self._layers])
        if self._text is not None:
            # Of the prompt's tokens only the last is new, see `DraftSession.observe`.
            self._text += tokens[0, -1:].tolist() if self._reading is None else tokens[0, : int(lengths[0])].tolist()
        if self._reading is None:
            self._reading = self._start_reading(*tokens.shape)
            if self._request.compiler is not None:
                self._reading.compile(self._request.compiler, self.options.max_depth + 1, self.options.max_frontier)
            self._root_hidden = self._reading.read_prompt(tokens, states)
            return
        self._read_pending()
        self._pending = (tokens, states, lengths.tolist())

    def draft(self, state: DraftState) -> DraftTree:
        self._read_pending()
        reading, root = self._reading, self._root_hidden
        if reading is None or root is None:
            raise RuntimeError("draft() before the first observe()")
        options = self.options
        try:
            if state.chains_only or (options.top_k == 1 and options.static_tree is None):
                return self._draft_chain(state, reading, root)
            if options.static_tree is not None:
                return self._draft_static(state, reading, root, options.static_tree.cut(state.max_depth))
            return self._draft_dynamic(state, reading, root)
        finally:
            reading.drop()

    def close(self) -> None:
        """Leaves what was read, and what is yet to be read, to the next turn."""
        if self._reading is not None and self._text is not None and self._request.cache is not None:
            self._conversations.keep(self._request.cache, self._text, (self._reading, self._pending))
        self._reading = self._pending = self._root_hidden = None

    def _start_reading(self, batch_size: int, count: int) -> Reading:
        """Positions are those of the text: where the start of it has no features, and no earlier turn has read it, the
        head starts cold but at the right place."""
        request = self._request
        if request.attention_mask is None:
            first = request.num_earlier + request.known_from
            return self._resumed(first, count) or Reading(
                self.head, None, (first + torch.arange(count)).expand(batch_size, -1)
            )
        positions = (request.attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        return Reading(self.head, request.attention_mask[:, -count:].bool(), positions[:, -count:])

    def _resumed(self, first: int, count: int) -> Reading | None:
        """The last turn's reading, if it read all entries before `first` as the text now has them. (The last of them
        pairs a feature of that turn with the first token of this one.)"""
        carried = self._conversations.take(self._request.cache, self._text)
        if carried is None or first == 0:
            return None
        num_alike, (reading, pending) = carried
        if pending is not None:
            reading.read(*pending)
        return reading.resumed(first, count) if num_alike > first else None

    def _read_pending(self) -> None:
        if self._reading is not None and self._pending is not None:
            (tokens, states, lengths), self._pending = self._pending, None
            hidden = self._reading.read(tokens, states, lengths)
            if 0 in lengths and self._root_hidden is not None:  # rows that have ended keep their root
                is_new = to_device(lengths, hidden.device)[:, None] > 0
                hidden = torch.where(is_new, hidden, self._root_hidden)
            self._root_hidden = hidden

    def _score_root(self, root: Tensor, state: DraftState) -> tuple[Tensor, Tensor]:
        """Scores of the root's children [B, 1, Vd], and the states that these children take."""
        logits, fed_back = self.head.read(root[:, None])
        return state.child_scores(logits, 0, self.target_ids), fed_back

    def _step(
        self, state: DraftState, depth: int, reading: Reading, tokens: Tensor, states: Tensor, plan: TreePlan
    ) -> tuple[Tensor, Tensor]:
        """Runs nodes at `depth`; scores of their children [B, n, Vd], and the states that these take."""
        logits, fed_back = reading.step(tokens, states, plan)
        return state.child_scores(logits, depth, self.target_ids), fed_back

    def _to_target(self, columns: Tensor) -> Tensor:
        return columns if self.target_ids is None else self.target_ids[columns]

    def _draft_chain(self, state: DraftState, reading: Reading, root: Tensor) -> DraftTree:
        drafted = [to_device(state.root_ids[:, None], self.head.device)]
        scores, fed_back = self._score_root(root, state)
        drafted.append(self._to_target(scores.argmax(-1)))
        for level in range(1, min(self.options.max_depth, state.max_depth)):
            plan = TreePlan.from_parents([range(-1, level - 1)])
            scores, fed_back = self._step(state, level, reading, drafted[-1], fed_back, plan)
            drafted.append(self._to_target(scores.argmax(-1)))
        return DraftTree.chain(torch.cat(drafted, dim=1))

    def _draft_dynamic(self, state: DraftState, reading: Reading, root: Tensor) -> DraftTree:
        depth = min(self.options.depth, state.max_depth)
        if not reading.compiles_trees:
            return self._grow(state, reading.step, root, depth)
        plain = partial(self._grow, state, reading.plain_step, root, depth)
        return reading.tree(root, state, self.target_ids, self.options, depth, plain)

    def _grow(self, state: DraftState, step: Step, root: Tensor, depth: int) -> DraftTree:
        """A dynamic tree, level by level."""
        scores, fed_back = self._score_root(root, state)

        def expand(frontier: Frontier) -> Tensor:
            nonlocal fed_back
            tokens = frontier.forest.token_ids[:, frontier.num_cached :]
            states = parent_states(fed_back, frontier.previous_index)
            logits, fed_back = step(tokens, states, frontier.forest.plan)
            return state.child_scores(logits, frontier.depth, self.target_ids)

        return grow_tree(
            state.root_ids,
            scores[:, 0],
            expand,
            depth=depth,
            top_k=self.options.top_k,
            max_nodes=self.options.max_nodes,
            token_ids=self.target_ids,
        )

    def _draft_static(self, state: DraftState, reading: Reading, root: Tensor, tree: StaticTree) -> DraftTree:
        tokens = torch.zeros(len(state.root_ids), len(tree.parents), dtype=torch.long, device=self.head.device)
        tokens[:, 0] = to_device(state.root_ids, tokens.device)
        scores, fed_back = self._score_root(root, state)
        self._fill(tokens, tree.levels[0], scores)
        run: tuple[int, ...] = ()
        for depth, level in enumerate(tree.levels[1:], start=1):
            run += level.nodes
            states = fed_back[:, to_device(level.previous, fed_back.device)]
            nodes = tokens[:, to_device(level.nodes, tokens.device)]
            scores, fed_back = self._step(state, depth, reading, nodes, states, tree.forest(run))
            self._fill(tokens, level, scores)
        return DraftTree(tokens, tree.parents)

    def _fill(self, tokens: Tensor, level: Level, scores: Tensor) -> None:
        """Writes the children of a level: the best-ranked tokens of its nodes."""
        columns = scores.topk(max(level.child_ranks) + 1, dim=-1).indices
        parents, ranks, children = (
            to_device(indices, tokens.device) for indices in (level.child_parents, level.child_ranks, level.children)
        )
        tokens[:, children] = self._to_target(columns[:, parents, ranks])
