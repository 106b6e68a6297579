"""Parts of captured drafts, which are functions of tensors with fixed shapes, so that they can be captured or compiled.

Each level of a draft is a forward of some hundred kernels, which the host launches more slowly than a GPU runs them. So
the function of a draft reads the entries that were committed since the last draft, and drafts after them. Everything
that changes from round to round comes in as one tensor, the draft's plan. The number of levels is one of few. For a
draft that is to be less deep, the function computes the other levels for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from hf_speculate.attention import CapturedMetadata
from hf_speculate.drafting import DraftState, Warpers, rank_children
from hf_speculate.forward import AcceptedPath
from hf_speculate.graphs import Buffers, Stacks, static_cache
from hf_speculate.transfers import copy_to_device
from hf_speculate.tree import DraftTree, TreePlan


# Levels of captured drafts.
_DEPTHS = (2, 4, 8)

# Columns of a draft's plan; then numbers of the method's own.
_LENGTH, _POSITION, _COUNT, _ROOT, _LIMIT, _OWN = range(6)

DraftResult = tuple[Tensor, Tensor, Tensor]
"""Tokens, parents and values of a captured tree, each [B, n]. The next call overwrites them."""


@dataclass(frozen=True, eq=False)
class DraftPlan:
    """The numbers of a captured draft that change from round to round.

    Attributes:
        table: int64 [B, 5 + J], one row of numbers for each row of the batch.
    """

    table: Int[Tensor, "B K"]

    @classmethod
    def place(cls, buffers: Buffers, rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """The table of `rows_of_plan`, in its buffer."""
        shape = len(rows), len(rows[0])
        return copy_to_device(rows, buffers.tensor(("draft plan", shape[1]), shape, torch.long, device))

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Number of entries of each row's text."""
        return self.table[:, _LENGTH]

    @property
    def positions(self) -> Int[Tensor, " B"]:
        """Position of the next entry of each row."""
        return self.table[:, _POSITION]

    @property
    def counts(self) -> Int[Tensor, " B"]:
        """Number of entries of each row that the draft reads."""
        return self.table[:, _COUNT]

    @property
    def roots(self) -> Int[Tensor, " B"]:
        """Token id of each row's root."""
        return self.table[:, _ROOT]

    @property
    def limit(self) -> Int[Tensor, 1]:
        """Deepest level whose nodes are kept."""
        return self.table[:1, _LIMIT]

    @property
    def own(self) -> Int[Tensor, "B J"]:
        """The method's own numbers: tokens of the entries that are read, for example."""
        return self.table[:, _OWN:]


def rows_of_plan(
    lengths: Iterable[int],
    positions: Iterable[int],
    counts: Iterable[int],
    roots: Tensor,
    depth: int,
    own: Iterable[Sequence[int]],
) -> list[list[int]]:
    """The rows of a `DraftPlan`.

    Args:
        lengths, positions, counts: see `DraftPlan`.
        roots: int64 [B] on the CPU, token id of each row's root.
        depth: deepest level whose nodes are kept.
        own: numbers of the method's own, equally many for each row.
    """
    of_rows = zip(lengths, positions, counts, roots.tolist(), own, strict=True)
    return [[length, position, count, root, depth, *more] for length, position, count, root, more in of_rows]


def graph_depths(depth: int, deepest: int) -> list[int]:
    """Numbers of levels of the graphs that can draft `depth` levels, the least deep first.

    Args:
        deepest: most levels that a draft may have.
    """
    return [min(levels, deepest) for levels in (*_DEPTHS, deepest) if levels >= depth]


class SlotPlace(NamedTuple):
    """Positions of new entries, the buffers that they are written to, and the entries that each of them sees.

    Attributes:
        positions: int64 [B, N].
        cache: cache whose layers show whole buffers.
        metadata: attention metadata of the new entries.
    """

    positions: Int[Tensor, "B N"]
    cache: Cache
    metadata: CapturedMetadata


class TextSlots:
    """The texts of all rows in static buffers, and new entries after the longest text.

    New entries have the same slots in all rows. `keep` moves them to the end of each row's own text. In eager drafts a
    cache that grows takes this place.

    Args:
        stacks: keys and values of all layers.
        inputs: `plan`, see `DraftPlan`; `prompt` [B, M], False for padding of the prompt; `starts` [B], number of
            padding entries of each row, if the kernel for trees computes attention.

    Attributes:
        stacks: the argument.
        lengths: int64 [B], entries of each row's text.
        positions: int64 [B], position of the next one.
    """

    def __init__(self, stacks: Stacks, inputs: Mapping[str, Any]):
        plan = DraftPlan(inputs["plan"])
        self.stacks, self._prompt, self._starts = stacks, inputs["prompt"], inputs.get("starts")
        self.lengths, self.positions = plan.lengths, plan.positions
        self._first = self.lengths.max()
        self._new: Tensor | None = None
        self._nodes: Tensor | None = None

    def next_slots(self, count: int) -> tuple[Int[Tensor, "B N"], Int[Tensor, " N"]]:
        """Positions and slots of `count` entries after the text."""
        self._new = steps = self._steps(count)
        return self.positions[:, None] + steps, self._first + steps

    def next_place(self, count: int) -> SlotPlace:
        """The place of `count` entries after the text, of which each sees those before it."""
        positions, slots = self.next_slots(count)
        steps = self._new
        assert steps is not None
        return self._place(positions, slots, slots, (steps[:, None] >= steps)[None])

    def node_place(self, plan: TreePlan, count: int) -> SlotPlace:
        """The place of the last `count` nodes of a tree after the text. They are the deepest ones."""
        self._nodes = slots = self._first + self._steps(plan.num_nodes)
        first = plan.num_nodes - count
        positions = (self.positions[:, None] + plan.max_depth).expand(-1, count)
        return self._place(positions, slots[first:], slots, plan.ancestors[:, first:])

    def keep(self, counts: Int[Tensor, " B"]) -> None:
        """Adds the first `counts[r]` of the entries that `next_slots` placed to the text of each row."""
        assert self._new is not None
        if len(counts) > 1:  # one row has them at their place already
            path = AcceptedPath(self._new.expand(len(counts), -1), counts)
            path.move(self.stacks, self._first, self.lengths)
        self.lengths, self.positions = self.lengths + counts, self.positions + counts
        self._first = self.lengths.max()

    def drop(self) -> None:
        """Clears the entries of the tree. Later drafts do not see them, but 0 x NaN would be NaN."""
        if self._nodes is not None:
            for stack in self.stacks:
                stack.index_fill_(3, self._nodes, 0)

    def _steps(self, count: int) -> Int[Tensor, " N"]:
        return torch.arange(count, device=self.lengths.device, dtype=torch.long)

    def _place(self, positions: Tensor, slots: Tensor, seen_slots: Tensor, seen: Tensor) -> SlotPlace:
        metadata = CapturedMetadata(self._prompt, self.lengths, seen_slots, seen, self._starts)
        return SlotPlace(positions, static_cache(self.stacks, slots), metadata)


def states_at(states: Float[Tensor, "B J H"], index: Int[Tensor, " B"]) -> Float[Tensor, "B H"]:
    """`states[r, index[r]]` of each row r."""
    return states[torch.arange(len(states), device=states.device, dtype=torch.long), index]


def last_states(
    states: Float[Tensor, "B J H"], counts: Int[Tensor, " B"], before: Float[Tensor, "B H"]
) -> Float[Tensor, "B H"]:
    """The last of the first `counts[r]` states of each row; for a row without any, that of `before`."""
    ends = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[-1])
    return torch.where(counts[:, None] > 0, states.gather(1, ends)[:, 0], before)


def request_inputs(
    buffers: Buffers, state: DraftState, depth: int, device: torch.device, target_ids: Tensor | None = None
) -> dict[str, Tensor]:
    """Inputs of a captured draft: `noise` [D, B, V] if the request samples, `target_ids` [Vd] if there are any."""
    inputs = {} if target_ids is None else {"target_ids": target_ids}
    if state.samples:
        shape = depth, len(state.root_ids), state.num_columns
        inputs["noise"] = buffers.tensor(("noise", depth), shape, torch.float32, device)
        state.fill_noise(inputs["noise"])
    return inputs


def log_noise_of(inputs: Mapping[str, Any], width: int) -> Float[Tensor, "D B C"] | None:
    """Logarithms of the noise in `request_inputs`, at up to `width` draft tokens; None for a greedy request."""
    if (noise := inputs.get("noise")) is None:
        return None
    target_ids = inputs.get("target_ids")
    return (noise if target_ids is None else noise[..., target_ids])[..., :width].log()


class CapturedRanking:
    """The ranking of children in a captured draft, see `DraftState.child_scores`.

    Args:
        inputs: `request_inputs`.
        width: number of draft tokens.
        warpers: the request's processors that warp logits.
    """

    def __init__(self, inputs: Mapping[str, Any], width: int, warpers: Warpers):
        self._log_noise, self._warpers = log_noise_of(inputs, width), warpers

    def __call__(self, logits: Float[Tensor, "B N W"], depth: int) -> Float[Tensor, "B N C"]:
        return rank_children(logits, None if self._log_noise is None else self._log_noise[depth], self._warpers)


def form_of(state: DraftState) -> tuple[bool, str]:
    """The part of a graph's key that the choice of tokens decides: whether the request samples, and its warpers."""
    if not state.samples:
        return False, ""
    return True, str([(type(warper).__name__, vars(warper)) for warper in state.warpers])


def result_of(tree: DraftTree) -> DraftResult:
    """The result of a captured draft."""
    assert isinstance(tree.parents, Tensor)
    assert tree.values is not None
    return tree.token_ids, tree.parents, tree.values


def first_nodes(result: Sequence[Tensor], num_drafted: int, depth: int) -> DraftTree:
    """The tree of a captured draft.

    Args:
        num_drafted: number of draft nodes to take; the best ones come first.
        depth: deepest level of these nodes.
    """
    tokens, parents, values = (part[:, : 1 + num_drafted] for part in result)
    return DraftTree(tokens, parents, max_depth=depth, values=values)
