"""The `eagle` drafter: EAGLE-1, EAGLE-2 (the same files with dynamic trees), EAGLE-3, P-EAGLE, and their sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_speculate.drafting import Conversations, DraftRequest, DraftState
from hf_speculate.stats import EAGER, NATIVE
from hf_speculate.target import GenerativeModel
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree, TreePlan

from ..draft_graph import states_at
from ..heads import HeadCache, HeadDrafter, HeadSession, LoadedHead
from ..trees import best_tree, slot_log_probs, slot_scores, trimmed
from .captured import CapturedSteps
from .head import EagleHead
from .saving import EagleFiles
from .spec import EagleConventions, EagleOptions, TreeSize
from .steps import Pending, PlainSteps, read_prompt


if TYPE_CHECKING:
    from .native import NativeForward


Steps = PlainSteps | CapturedSteps


class EagleSession(HeadSession[Any]):
    """Drafts for one request: trees from the head's own states, after the entries that it has read. The head is any
    `FeedingHead`.

    The forward that reads the tokens of a round also expands the root of the next tree: entry i pairs the feature at
    token i with token i + 1, so the last new entry belongs to the root and its output ranks the root's children.

    Args:
        layers: key by which `observe` is given each feature that the head takes.
    """

    _steps: Steps | None

    def __init__(
        self,
        loaded: LoadedHead[Any],
        layers: Sequence[int],
        options: EagleOptions,
        conversations: Conversations[Any],
        request: DraftRequest,
        native: NativeForward | None = None,
    ):
        super().__init__(loaded, options, conversations, request)
        self._layers, self._native = layers, native
        self._pending: Pending | None = None
        self._root_hidden: Tensor | None = None

    def observe(self, tokens: Tensor, features: Mapping[int, Tensor], lengths: Tensor) -> None:
        head, states = self._loaded.head, [features[layer] for layer in self._layers]
        if self._text is not None:
            # Of the prompt's tokens only the last is new, see `DraftSession.observe`.
            self._text += tokens[0, -1:].tolist() if self._head_cache is None else tokens[0, : int(lengths[0])].tolist()
        if self._head_cache is None:
            head_cache = self._begin(tokens)
            self._steps = self._steps_over(head_cache)
            embeddings = head.prompt_embeddings(tokens, states)
            self._root_hidden = read_prompt(head, head_cache, tokens, head.fuse(states), self._native, embeddings)
            return
        self._read_pending()
        self._pending = (tokens, states, lengths.tolist())

    def draft(self, state: DraftState) -> DraftTree:
        head_cache, steps = self._head_cache, self._steps
        if head_cache is None or steps is None:
            raise RuntimeError("draft() before the first observe()")
        try:
            if self._loaded.spec.parallel:
                return self._draft_parallel(state, steps, self._root())
            return self._draft_dynamic(state, steps)
        finally:
            head_cache.drop()

    def close(self) -> None:
        super().close()
        self._pending = self._root_hidden = None

    def _carried_state(self, head_cache: HeadCache) -> tuple[HeadCache, Pending | None]:
        return head_cache, self._pending

    def _resume(self, left: Any, num_alike: int, first: int, count: int) -> HeadCache | None:
        head_cache, pending = left
        if pending is not None:
            self._read(self._steps_over(head_cache), head_cache, pending)
        # The last entry pairs a feature of the last turn with the first token of this one.
        return head_cache.resumed(first, count) if num_alike > first else None

    def _steps_over(self, head_cache: HeadCache) -> Steps:
        native, record = self._native, self._request.record
        if native is not None and not self._loaded.spec.parallel and not head_cache.has_windows:
            from .native import NativeSteps  # only sessions with a kernel need it

            if not (problem := native.problem_with_trees):
                return NativeSteps(self._loaded, head_cache, native, record)  # not compiled: graphs of trees are slower
            record.refuse(NATIVE, problem)
        plain = PlainSteps(self._loaded, head_cache, self._recorded)
        if self._runner is None:
            return plain
        return CapturedSteps(plain, self._loaded, head_cache, self.options, self._runner, record)

    def _recorded(self, *entries: Any) -> Tensor | None:
        """The states of entries by the kernel, if it computes them. The forward is counted by its runner."""
        if self._native is None:
            self._request.record.ran(EAGER)
            return None
        return self._native(*entries, record=self._request.record)

    def _read_pending(self) -> None:
        if self._head_cache is None or self._steps is None or self._pending is None:
            return
        pending, self._pending = self._pending, None
        hidden, lengths = self._read(self._steps, self._head_cache, pending), pending[2]
        if 0 in lengths and self._root_hidden is not None:  # rows that have ended keep their root
            is_new = to_device(lengths, hidden.device)[:, None] > 0
            hidden = torch.where(is_new, hidden, self._root_hidden)
        self._root_hidden = hidden

    @torch.no_grad()
    def _read(self, steps: Steps, head_cache: HeadCache, pending: Pending) -> Tensor:
        """Commits pending entries; returns the states of the last entry of every row [B, Hd]."""
        token_ids, features, lengths = pending
        hidden = steps.entries(token_ids, self._loaded.head.fuse(features))
        head_cache.keep(lengths)
        last = to_device([max(length, 1) - 1 for length in lengths], hidden.device)
        return states_at(hidden, last)

    def _root(self) -> Tensor:
        """States of the entry committed last, after all pending entries were read."""
        self._read_pending()
        assert self._root_hidden is not None
        return self._root_hidden

    def _draft_dynamic(self, state: DraftState, steps: Steps) -> DraftTree:
        """A tree, or the best chain if the target cannot score branches."""
        options, depth = self.options, min(self.options.depth, state.max_depth)
        if not depth:
            return DraftTree.root_only(state.root_ids)
        # Another width would be another graph.
        width = options.width(state.samples, state.num_nodes if self._runner is None else None)
        if width > 1 and not state.chains_only:
            return self._tree(state, steps, TreeSize(depth, width, options.max_nodes))
        # Take the largest number of nodes of any chain: the number of this round would need another graph.
        chain = self._tree(state, steps, TreeSize(depth, 1, options.depth))
        return DraftTree.chain(chain.token_ids, chain.values)

    def _tree(self, state: DraftState, steps: Steps, size: TreeSize) -> DraftTree:
        drawn = None if self._pending is None else steps.tree_after(self._pending, state, size, self._root_hidden)
        if drawn is None:
            return steps.tree(self._root(), state, size)
        tree, self._root_hidden = drawn
        self._pending = None
        return tree

    @cached_property
    def _mask(self) -> tuple[Tensor, Tensor]:
        """Token and state of every deeper token of a P-EAGLE draft. They are kept, because their projection is as large
        as one of a layer of the target."""
        return self._loaded.head.masks(1, 1)

    @torch.no_grad()
    def _draft_parallel(self, state: DraftState, steps: Steps, root: Tensor) -> DraftTree:
        """The best tree from the last entry and the masks after it. It takes two forwards at any depth."""
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
        log_probs_of = slot_log_probs(scores, target_ids, 1 if state.chains_only else options.width(state.samples))
        roots = to_device(state.root_ids, root.device)
        return trimmed(best_tree(roots, log_probs_of, depth=depth, max_nodes=options.max_nodes), state.active)


class EagleDrafter(HeadDrafter[EagleHead]):
    """Drafts with an EAGLE head; for its arguments see `HeadDrafter`.

    Heads are saved as "safeailab", "specforge" ("sglang"), "speculators" ("vllm") or "compact"; by default as
    "speculators", and EAGLE-1 as "safeailab", the only layout that has it.

    Attributes:
        entry_layers: the target's features that the head takes, in its order; `feature_layers` has each once.
    """

    name = "eagle"
    options_classes = (EagleOptions, EagleConventions)
    head_files = EagleFiles

    def __init__(self, loaded: LoadedHead[EagleHead], target: GenerativeModel, options: EagleOptions | None = None):
        super().__init__(loaded, target, options)
        self.entry_layers = self.spec.entry_layers(self._num_target_layers)
        self.feature_layers = tuple(dict.fromkeys(self.entry_layers))
        self._made: tuple[EagleHead, NativeForward | None] | None = None

    def __repr__(self) -> str:
        return f"EagleDrafter({self.spec.kind}, {self.spec.dialect}, {self.options})"

    @property
    def _native(self) -> NativeForward | None:
        return self._native_of(self.head)

    def _native_of(self, head: EagleHead) -> NativeForward | None:
        """The kernel's form of a head. Making it may take a compiler, so it waits for the first request."""
        from .native import NativeForward  # and the package for packed targets

        made = self._made
        if made is None or made[0] is not head:
            made = self._made = head, NativeForward.of(head)
        return made[1]

    def ready(self, target: GenerativeModel) -> LoadedHead[EagleHead]:
        """The head that drafts for `target`, with the kernel's form of it."""
        loaded = super().ready(target)
        self._native_of(loaded.head)
        return loaded

    def start(self, request: DraftRequest) -> EagleSession:
        loaded = self.ready(request.target)
        native = self._native_of(loaded.head)
        if native is None:
            from .native import problem_without_kernel

            if problem := problem_without_kernel(loaded.head):
                request.record.refuse(NATIVE, problem)
        return EagleSession(loaded, self.entry_layers, self.options, self.conversations, request, native)
