"""A head's reading state: its KV cache, the positions of its rows, and the masks of its forwards.

Committed entries (from the target's features) stay; entries of a growing tree are appended behind them and dropped
before the next round, so a drafted state never outlives its round. Rows of a batch may be left padded and have their
own lengths; a hole is masked, never re-used before `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hf_speculate.cache import TreeCache
from hf_speculate.compilation import Compiler
from hf_speculate.drafting import DraftState
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree, TreePlan

from .attending import CachedAttention
from .head import EagleHead
from .steps import StaticSteps, problem_with_head


if TYPE_CHECKING:
    from .drafter import EagleOptions

Step = Callable[[Tensor, Tensor, TreePlan], tuple[Tensor, Tensor]]
"""Runs a level of a tree: see `Reading.step`."""

# Entries of a prompt that are run at once: a mask of the whole prompt would be quadratic in its length.
_CHUNK = 1024


class Reading:
    """What a head has read in one request.

    Args:
        head: the head.
        prompt_mask: bool [B, J], which entries of the prompt are real; None when all are.
        positions: int64 [B, J], position of every entry of the prompt.
        cache: what an earlier turn has read of the text before the prompt; every entry of it is real.
    """

    def __init__(
        self,
        head: EagleHead,
        prompt_mask: Bool[Tensor, "B J"] | None,
        positions: Int[Tensor, "B J"],
        cache: TreeCache | None = None,
    ):
        self.head = head
        self.cache = cache or TreeCache(DynamicCache(), positions.shape[0])
        device = head.device
        self._prompt_mask = None if prompt_mask is None or bool(prompt_mask.all()) else prompt_mask.to(device)
        self._prompt_positions = positions.to(device)
        # Behind the prompt, position = index in the cache + shift.
        last_index = self.cache.append_index + positions.shape[1] - 1
        self._shifts = [last - last_index for last in positions[:, -1].tolist()]
        self._steps: StaticSteps | None = None

    def compile(self, compiler: Compiler, num_entries: int, num_nodes: int) -> None:
        """Has `read` and `step` compiled where that can be; see `StaticSteps`."""
        if problem := problem_with_head(self.head):
            compiler.refuse(problem)
        else:
            self._steps = StaticSteps(self.head, self.cache, compiler, num_entries, num_nodes)

    @torch.no_grad()
    def read_prompt(self, token_ids: Int[Tensor, "B J"], states: Float[Tensor, "B J Hd"]) -> Float[Tensor, "B Hd"]:
        """Commits the prompt's entries, padding included; returns the hidden states of the last one."""
        hidden = states
        for start in range(0, token_ids.shape[1], _CHUNK):
            part = slice(start, min(start + _CHUNK, token_ids.shape[1]))
            size = part.stop - start
            positions = self._prompt_positions[:, part]
            plain = not self.cache.append_index and self._prompt_mask is None and not any(self.head.spec.windows)
            masks = None if plain else self._masks(_causal(size), positions, mask_block=True)
            attend = CachedAttention(self.cache.cache, masks, is_causal=plain and size > 1)
            hidden = self.head(token_ids[:, part], states[:, part], positions, attend)
            self.cache.commit_appended()
        return hidden[:, -1]

    @torch.no_grad()
    def read(
        self, token_ids: Int[Tensor, "B J"], states: Float[Tensor, "B J Hd"], lengths: Sequence[int]
    ) -> Float[Tensor, "B Hd"]:
        """Commits the first `lengths[r]` entries of each row; returns the hidden states of the last of them."""
        count = token_ids.shape[1]
        positions = self._positions(torch.arange(count)[None])
        inputs = token_ids, states, positions, self._masks(_causal(count), positions)

        def plain() -> Tensor:
            return self.head(*inputs[:3], CachedAttention(self.cache.cache, inputs[3]))

        hidden = plain() if self._steps is None else self._steps.entries(inputs, plain)
        self.cache.keep([range(length) for length in lengths])
        last = to_device([max(length, 1) - 1 for length in lengths], hidden.device)
        return hidden[torch.arange(len(lengths), device=hidden.device), last]

    @torch.no_grad()
    def expand(
        self, token_ids: Int[Tensor, "B F"], states: Float[Tensor, "B F Hd"], plan: TreePlan
    ) -> Float[Tensor, "B F Hd"]:
        """Runs the last F nodes of a forest whose earlier nodes were run since the last `drop`; commits nothing.

        Args:
            plan: structure of the forest, its roots being children of the entry committed last.
        """
        positions, masks = self._nodes(plan, token_ids.shape[1])
        return self.head(token_ids, states, positions, CachedAttention(self.cache.cache, masks))

    def step(
        self, token_ids: Int[Tensor, "B F"], states: Float[Tensor, "B F Hd"], plan: TreePlan
    ) -> tuple[Float[Tensor, "B F Vd"], Float[Tensor, "B F Hd"]]:
        """`EagleHead.read` of what `expand` gives."""
        plain = partial(self.plain_step, token_ids, states, plan)
        if self._steps is None:
            return plain()
        return self._steps.level((token_ids, states, *self._nodes(plan, token_ids.shape[1])), plain)

    @torch.no_grad()
    def plain_step(self, token_ids: Tensor, states: Tensor, plan: TreePlan) -> tuple[Tensor, Tensor]:
        """`step`, never compiled."""
        return self.head.read(self.expand(token_ids, states, plan))

    @property
    def compiles_trees(self) -> bool:
        return self._steps is not None and not any(self.head.spec.windows)

    def tree(
        self,
        root: Float[Tensor, "B Hd"],
        state: DraftState,
        target_ids: Int[Tensor, " Vd"] | None,
        options: EagleOptions,
        depth: int,
        plain: Callable[[], DraftTree],
    ) -> DraftTree:
        """The dynamic tree that `plain` grows, as one compiled function; see `StaticSteps.tree`."""
        assert self._steps is not None
        starts = self._positions(torch.zeros(1, 1, dtype=torch.long))
        visible = self._visible_prefix(self.cache.append_index)
        return self._steps.tree(root, starts, visible, state, target_ids, options, depth, plain)

    def _nodes(self, plan: TreePlan, count: int) -> tuple[Tensor, list[Tensor | None]]:
        """Positions and masks of the last `count` nodes of a forest."""
        first = plan.num_nodes - count
        positions = self._positions(plan.depths[:, first:])
        return positions, self._masks(plan, positions, first)

    def resumed(self, num_entries: int, num_new: int) -> Reading | None:
        """The reading of the next turn's text, which goes on with `num_new` entries behind the first `num_entries` of
        this one; None where fewer have been read, or not from the start of the text. One row; this one ends."""
        if self._shifts != [0] or self._prompt_mask is not None or self.cache.append_index < num_entries:
            return None
        self.cache.truncate([num_entries])
        return Reading(self.head, None, torch.arange(num_entries, num_entries + num_new)[None], self.cache)

    def drop(self) -> None:
        """Forgets what `expand` appended."""
        self.cache.restore()

    def _positions(self, depths: Tensor) -> Tensor:
        starts = [length + shift for length, shift in zip(self.cache.lengths, self._shifts, strict=True)]
        return to_device(starts, self.head.device)[:, None] + to_device(depths, self.head.device)

    def _masks(
        self, plan: TreePlan, positions: Tensor, first: int = 0, mask_block: bool = False
    ) -> list[Tensor | None]:
        """Masks of a forward over the nodes of `plan` from `first` on, one a layer.

        Args:
            positions: int64 [B, n], of these nodes.
            mask_block: the nodes are a part of the prompt, with its holes.
        """
        num_prefix = self.cache.append_index
        visible = self._visible_prefix(num_prefix)
        is_chain = plan.num_nodes == plan.max_depth + 1
        windows = self.head.spec.windows
        if visible is None and is_chain and positions.shape[1] == 1 and not any(windows):
            return [None] * len(windows)
        dtype, device = self.head.dtype, self.head.device
        low = torch.finfo(dtype).min
        rows = positions.shape[0] if visible is not None or any(windows) else plan.depths.shape[0]
        mask = torch.zeros(rows, 1, positions.shape[1], num_prefix + plan.num_nodes, dtype=dtype, device=device)
        if visible is not None:
            mask[..., :num_prefix].masked_fill_(~visible[:, None, None], low)
        mask[..., num_prefix:] = plan.bias(dtype, device)[:, None, first:]
        if mask_block and self._prompt_mask is not None:
            block = self._prompt_mask[:, num_prefix : num_prefix + plan.num_nodes]
            mask[..., num_prefix:].masked_fill_(~block[:, None, None], low)
        return [self._windowed(mask, plan, positions, window) for window in windows]

    def _windowed(self, mask: Tensor, plan: TreePlan, positions: Tensor, window: int | None) -> Tensor:
        """`mask` that also hides what is `window` or more positions back."""
        if window is None:
            return mask
        num_prefix = mask.shape[-1] - plan.num_nodes
        shifts = to_device(self._shifts, mask.device)[:, None]
        earlier = torch.arange(num_prefix, device=mask.device) + shifts
        block, depths = positions, to_device(plan.depths, mask.device)
        if plan.num_nodes > positions.shape[1]:  # earlier nodes of the tree are in the cache
            block = positions[:, :1] - depths[:, -positions.shape[1]][:, None] + depths
        keys = torch.cat([earlier, block], dim=1)
        too_far = positions[:, :, None] - keys[:, None, :] >= window
        return mask.masked_fill(too_far[:, None], torch.finfo(mask.dtype).min)

    def _visible_prefix(self, num_prefix: int) -> Tensor | None:
        """bool [B, num_prefix], entries that are real; None if all are."""
        if self._prompt_mask is None and not self.cache.is_ragged:
            return None
        lengths = to_device(self.cache.lengths, self.head.device)
        visible = torch.arange(num_prefix, device=self.head.device) < lengths[:, None]
        if self._prompt_mask is not None:
            width = min(self._prompt_mask.shape[1], num_prefix)
            visible[:, :width] &= self._prompt_mask[:, :width]
        return visible


def _causal(count: int) -> TreePlan:
    """The plan of a chain. Prompts are long and of many lengths, so it is not compiled node by node nor cached."""
    ancestors = torch.ones(1, count, count, dtype=torch.bool).tril()
    return TreePlan(depths=torch.arange(count)[None], ancestors=ancestors, max_depth=count - 1)
