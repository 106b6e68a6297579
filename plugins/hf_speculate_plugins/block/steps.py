"""Forwards of a block session, plain and compiled: read the context of a round, draft the tree of a block.

Compiled, both are one graph, as deep as the options allow. A less deep tree is a part of its tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.attention import text_entries
from hf_speculate.drafting import DraftState, Warpers
from hf_speculate.forward import AcceptedPath
from hf_speculate.graphs import Buffers, Stacks, capacity_for, static_cache
from hf_speculate.stats import EAGER, RunnerRecord
from hf_speculate.transfers import copy_to_device, to_device
from hf_speculate.tree import DraftTree

from ..draft_graph import form_of, log_noise_of, request_inputs
from ..heads import CapturedForwards, HeadCache, LoadedHead, Place
from ..trees import best_tree
from .head import BlockHead, block_masks
from .scores import BlockRequest, BlockScores, num_children
from .spec import BlockOptions


class PlainSteps:
    """Forwards of the modules as they are; the reference.

    Attributes:
        last: state of each row's last context entry [B, H]. Only heads with a lattice keep it up to date.
    """

    def __init__(
        self,
        loaded: LoadedHead[BlockHead],
        head_cache: HeadCache,
        options: BlockOptions,
        last: Tensor,
        record: RunnerRecord,
    ):
        self._loaded, self._head_cache, self._options, self.last = loaded, head_cache, options, last
        self._record = record

    @torch.no_grad()
    def context(self, features: Sequence[Float[Tensor, "B J Ht"]], lengths: Sequence[int]) -> None:
        """Commits the features of the first `lengths[r]` tokens of each row."""
        positions = self._head_cache.positions_at(
            torch.arange(features[0].shape[1], dtype=torch.long, device="cpu")[None]
        )
        head = self._loaded.head
        states = append_context(head, self._head_cache.tree_cache.cache, head.join(features), positions)
        if head.spec.lattice is not None:
            self.last = last_states(
                states, to_device(torch.tensor(lengths, dtype=torch.long, device="cpu"), head.device), self.last
            )
        self._head_cache.keep(lengths)

    def settle(self) -> None:
        """Commits the features that wait for the next draft; here none wait."""

    @torch.no_grad()
    def tree(self, state: DraftState, depth: int, before: Int[Tensor, " B"] | None = None) -> DraftTree:
        """The best tree of this depth (>= 1). Its last nodes may have the value -inf, so they are impossible. For
        `before` see `BlockRequest`."""
        head, request = self._loaded.head, BlockRequest.of(self._loaded, self._options, state, depth)
        request = request._replace(before=before, last=self.last)
        log_probs_of = BlockScores.of_block(head, request, self.slots(request.anchors), depth).child_log_probs()
        return best_tree(request.anchors, log_probs_of, depth=depth, max_nodes=self._options.max_nodes)

    @torch.no_grad()
    def slots(self, anchors: Int[Tensor, " B"]) -> Float[Tensor, "B S H"]:
        """States of all slots after the entries that were read."""
        head = self._loaded.head
        positions, masks = block_place(head, self._head_cache)
        self._record.ran(EAGER)
        return head(head.block_ids(anchors), positions, head.attention(self._head_cache.tree_cache.cache, masks))


@torch.no_grad()
def read_prompt(head: BlockHead, head_cache: HeadCache, joined: Float[Tensor, "B J W"]) -> Float[Tensor, "B H"]:
    """Commits the prompt's features; the state of the last. Prompts have many lengths: this is never compiled."""
    states = append_context(head, head_cache.tree_cache.cache, joined, head_cache.prompt_positions)
    head_cache.keep_all()
    return states[:, -1].clone()


def block_place(head: BlockHead, head_cache: HeadCache) -> Place:
    """Positions and masks of the slots of a block after the entries that were read."""
    positions = head_cache.positions_at(torch.arange(head.spec.block_size, dtype=torch.long, device="cpu")[None])
    return positions, block_masks(head.spec, positions, head_cache.entry_positions(), head_cache.visible(), head.dtype)


def append_context(head: BlockHead, cache: Cache, joined: Tensor, positions: Tensor) -> Float[Tensor, "B J H"]:
    """Appends keys and values of J features, joined, to `cache`; the states that they were made of."""
    states = head.fuse_joined(joined)
    head.read(states, positions, lambda layer, *keys_values: cache.update(*keys_values, layer))
    return states


def last_states(
    states: Float[Tensor, "B J H"], counts: Int[Tensor, " B"], before: Float[Tensor, "B H"]
) -> Float[Tensor, "B H"]:
    """The last of the first `counts[r]` states of each row; for a row without any, that of `before`."""
    ends = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[-1])
    return torch.where(counts[:, None] > 0, states.gather(1, ends)[:, 0], before)


# Columns of a draft's plan: entries of the head's text, position of the next one, number of features to read, root id,
# depth of the tree, token before the root.
_LENGTH, _POSITION, _COUNT, _ROOT, _LIMIT, _BEFORE = range(6)


def block_draft(
    head: BlockHead, stacks: Stacks, inputs: dict[str, Tensor], warpers: Warpers, depth: int, top_k: int, max_nodes: int
) -> tuple[Tensor, ...]:
    """Reads the features of a round, and drafts the best tree of a block.

    Args:
        inputs: `plan` [B, 6]; `prompt` [B, M], False for padding of the prompt; `features` [B, J, W], from
            `BlockHead.join`; `last`, see `PlainSteps`; `request_inputs`.
    Returns:
        Tokens, parents and values [B, n], and the new `last` of a head with a lattice.
    """
    plan, target_ids = inputs["plan"], inputs.get("target_ids")
    before = plan[:, _BEFORE] if head.spec.reads_before_anchor else None
    counts, anchors = plan[:, _COUNT], plan[:, _ROOT]
    states = _read_context(head, stacks, inputs)
    last = [] if head.spec.lattice is None else [last_states(states, counts, inputs["last"])]
    lengths, positions = plan[:, _LENGTH] + counts, plan[:, _POSITION] + counts
    slots = _run_block(head, stacks, inputs["prompt"], anchors, lengths, positions)
    log_noise = log_noise_of(inputs, head.spec.draft_vocab_size)
    log_noise = None if log_noise is None else log_noise.transpose(0, 1)
    request = BlockRequest(target_ids, top_k, anchors, log_noise, warpers, before, *last)
    log_probs_of = BlockScores.of_block(head, request, slots, depth).child_log_probs()
    tree = best_tree(anchors, log_probs_of, depth=depth, max_nodes=max_nodes, limit=plan[:1, _LIMIT])
    assert isinstance(tree.parents, Tensor)
    assert tree.values is not None
    return tree.token_ids, tree.parents, tree.values, *last


def _read_context(head: BlockHead, stacks: Stacks, inputs: dict[str, Tensor]) -> Float[Tensor, "B J H"]:
    """Appends the features of a round, in each row at the end of its text; their states."""
    plan, features = inputs["plan"], inputs["features"]
    steps, lengths = torch.arange(features.shape[1], device=plan.device, dtype=torch.long), plan[:, _LENGTH]
    slots = lengths.max() + steps
    states = append_context(head, static_cache(stacks, slots), features, plan[:, _POSITION, None] + steps)
    if len(plan) > 1:  # one row has them at their place already
        along = AcceptedPath(steps.expand(len(plan), -1), plan[:, _COUNT])
        along.move(stacks, slots[0], lengths)
    return states


def _run_block(
    head: BlockHead,
    stacks: Stacks,
    prompt: Bool[Tensor, "B M"],
    anchors: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    positions: Int[Tensor, " B"],
) -> Float[Tensor, "B S H"]:
    """States of all slots of a block, which is written after the longest text.

    Args:
        lengths: entries of each row's text.
        positions: position of the next one.
    """
    steps, entries = (
        torch.arange(n, device=prompt.device, dtype=torch.long) for n in (head.spec.block_size, prompt.shape[1])
    )
    slots, places = positions[:, None] + steps, lengths.max() + steps
    seen_positions = entries + (positions - lengths)[:, None]
    masks = block_masks(head.spec, slots, seen_positions, text_entries(prompt, lengths), head.dtype, places)
    return head(head.block_ids(anchors), slots, head.attention(static_cache(stacks, places), masks))


class CapturedSteps(CapturedForwards):
    """The same with fixed shapes, compiled. Features wait for the next draft, which reads them.

    For the arguments see `CapturedForwards`.
    """

    _plain: PlainSteps
    _options: BlockOptions

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._depth = min(self._options.depth or self._head.spec.max_depth, self._head.spec.max_depth)
        self._pending: tuple[Sequence[Tensor], Sequence[int]] | None = None

    def context(self, features: Sequence[Tensor], lengths: Sequence[int]) -> None:
        self.settle()
        self._pending = features, lengths
        if features[0].shape[1] > self._num_read:
            self.settle()

    def settle(self) -> None:
        """Commits the features that wait for the next draft."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._plain.context(*pending)

    def tree(self, state: DraftState, depth: int, before: Tensor | None = None) -> DraftTree:
        head, max_nodes = self._head, self._options.max_nodes
        top_k = num_children(head.spec, self._options, state)
        batch_size, capacity = len(state.root_ids), capacity_for(self.end + self._num_read + head.spec.block_size)
        sizes = self._depth, top_k, max_nodes
        key = batch_size, capacity, sizes, head.dtype, *form_of(state)

        def arguments() -> tuple[Any, ...]:
            stacks, buffers = self.place(batch_size, capacity)
            return head, stacks, self._inputs(buffers, state, depth, capacity, before), tuple(state.warpers), *sizes

        result = self.run(key, block_draft, arguments, lambda: None)
        if result is None:
            self.settle()
            return self._plain.tree(state, depth, before)
        if self._pending is not None:
            self._head_cache.tree_cache.has_moved = True
            self._head_cache.keep(self._pending[1])
            self._pending = None
        tree, last = result[:3], result[3:]
        if last:  # the next call overwrites it
            self._plain.last = last[0].clone()
        tokens, parents, values = (part[:, : 1 + _num_scored(depth, top_k, max_nodes)] for part in tree)
        return DraftTree(tokens, parents, max_depth=depth, values=values)

    @property
    def _num_read(self) -> int:
        """Number of features that a graph reads: those of a whole accepted path."""
        return self._depth + 1

    def _inputs(
        self, buffers: Buffers, state: DraftState, depth: int, capacity: int, before: Tensor | None
    ) -> dict[str, Tensor]:
        """The inputs of `block_draft`, in buffers."""
        head, head_cache, roots = self._head, self._head_cache, state.root_ids.tolist()
        features, counts = self._pending or ((), [0] * len(roots))
        of_rows = zip(head_cache.tree_cache.lengths, head_cache.next_positions(), counts, roots, strict=True)
        earlier = roots if before is None else before.tolist()
        plan = buffers.tensor("plan", (len(roots), 6), torch.long, head.device)
        return {
            "plan": copy_to_device([[*row, depth, token] for row, token in zip(of_rows, earlier, strict=True)], plan),
            "prompt": self.prompt(buffers, len(roots), capacity),
            "features": self._placed(buffers, features, len(roots)),
            **({} if head.spec.lattice is None else {"last": buffers.filled("last", self._plain.last)}),
            **request_inputs(buffers, state, self._depth, head.device, self._loaded.target_ids),
        }

    def _placed(self, buffers: Buffers, features: Sequence[Tensor], batch_size: int) -> Tensor:
        """The features in their buffer. What follows them is left from earlier rounds."""
        head = self._head
        shape = batch_size, self._num_read, head.spec.num_features * head.spec.target_hidden_size
        placed = buffers.tensor("features", shape, head.dtype, head.device)
        if features:
            placed[:, : features[0].shape[1]].copy_(head.join(features))
        return placed


def _num_scored(depth: int, top_k: int, max_nodes: int) -> int:
    """Number of nodes down to `depth` that `best_tree` chooses from."""
    total, num_parents = 0, 1
    for _ in range(depth):
        total += num_parents * top_k
        num_parents = min(max_nodes, num_parents * top_k)
    return total
