"""The KV cache of a head in one request, with the positions of its entries and the masks of new ones.

Committed entries (from the target's features) stay. Entries of a growing tree are appended after them and dropped
before the next round, so a drafted state never outlives its round. Rows of a batch may be left padded and have their
own lengths; a hole is masked, never re-used before `keep`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hf_speculate.attention import AttentionMetadata, prefix_mask
from hf_speculate.cache import TreeCache
from hf_speculate.drafting import DraftRequest
from hf_speculate.target import LayerType
from hf_speculate.transfers import to_device
from hf_speculate.tree import TreePlan

from .head import SharingHead


Place = tuple[Tensor, list[Tensor | None]]
"""Positions of new entries [B, N], and for each layer an additive mask [B or 1, 1, N, M + N], None: they see all."""


class HeadCache:
    """The KV cache of one request. The forwards that fill it are elsewhere.

    Args:
        prompt_mask: bool [B, J], the entries of the prompt that are real; None when all are.
        positions: int64 [B, J], position of every entry of the prompt; [kinds, B, J] for a head that counts pictures.
        tree_cache: entries of the text before the prompt, from an earlier turn; all of them are real.

    Attributes:
        tree_cache: keys and values of all entries.
        prompt_mask: the argument on the head's device; None when all entries are real.
        prompt_positions: `positions` on the head's device.
    """

    def __init__(
        self,
        head: SharingHead[Any],
        prompt_mask: Bool[Tensor, "B J"] | None,
        positions: Int[Tensor, "*kinds B J"],
        tree_cache: TreeCache | None = None,
    ):
        self.head = head
        self.tree_cache = tree_cache or TreeCache(DynamicCache(), positions.shape[-2])
        self._layers = [LayerType("", layer, window) for layer, window in enumerate(head.windows)]
        device = head.device
        self.prompt_mask = None if prompt_mask is None or bool(prompt_mask.all()) else prompt_mask.to(device)
        self.prompt_positions = positions.to(device)
        # After the prompt, position = index in the cache + shift.
        last_index = self.tree_cache.append_index + positions.shape[-1] - 1
        self._shifts = [last - last_index for last in _of_one_kind(positions)[:, -1].tolist()]

    @classmethod
    def begin(
        cls,
        head: SharingHead[Any],
        request: DraftRequest,
        shape: tuple[int, int],
        resume: Callable[[int], HeadCache | None],
    ) -> HeadCache:
        """The cache of a request whose prompt has features at the last J positions of its B rows.

        Positions are those of the text. If the start of the text has no features, and no earlier turn has read it, its
        entries are missing, but the others have the right positions.

        Args:
            resume: function that returns the earlier turn's cache, cut to a number of entries and ready for this
                request; None if there is none.
        """
        num_rows, count = shape
        mask, of_kinds = request.attention_mask, request.position_ids
        if head.counts_pictures and of_kinds is not None and len(of_kinds) > 1:
            real = None if mask is None else mask[:, -count:].bool()
            return cls(head, real, of_kinds[1:, :, -count:].expand(-1, num_rows, -1))
        if mask is None:
            first = request.num_earlier + request.known_from
            positions = (first + torch.arange(count, dtype=torch.long, device="cpu")).expand(num_rows, -1)
            return resume(first) or cls(head, None, positions)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return cls(head, mask[:, -count:].bool(), positions[:, -count:])

    @property
    def has_windows(self) -> bool:
        """Whether some layers do not see all of the text."""
        return any(self.head.windows)

    def entry_positions(self) -> Int[Tensor, "B M"]:
        """Positions of the committed entries; those of padding and holes have no meaning."""
        return (
            torch.arange(self.tree_cache.append_index, device=self.head.device, dtype=torch.long) + self._shift_column()
        )

    def prompt_place(self, part: slice) -> tuple[Tensor, list[Tensor | None] | None]:
        """Positions and masks of some entries of the prompt. Those before them are committed, those after them did not
        run yet.

        Returns:
            Positions and masks. None instead of masks if causal attention over these entries alone is the same.
        """
        positions = self.prompt_positions[..., part]
        if not self.tree_cache.append_index and self.prompt_mask is None and not self.has_windows:
            return positions, None
        real = None if self.prompt_mask is None else self.prompt_mask[:, part]
        return positions, self._masks(self._metadata(_causal(positions.shape[-1]), real=real))

    def next_place(self, count: int) -> Place:
        """Positions and masks of `count` entries after the committed ones."""
        metadata = self._metadata(_causal(count))
        return metadata.positions(), self._masks(metadata)

    def node_place(self, plan: TreePlan, count: int) -> Place:
        """Positions and masks of the last `count` nodes of a forest whose earlier nodes were run since `drop`."""
        metadata = self._metadata(plan, plan.num_nodes - count)
        return metadata.positions(), self._masks(metadata)

    def positions_at(self, depths: Int[Tensor, "R N"]) -> Int[Tensor, "B N"]:
        """Positions of nodes at these depths, 0 being that of the next entry of a row."""
        return to_device(self.next_positions(), self.head.device)[:, None] + to_device(depths, self.head.device)

    def next_positions(self) -> list[int]:
        """Position of the next entry of each row."""
        return [length + shift for length, shift in zip(self.tree_cache.lengths, self._shifts, strict=True)]

    def visible(self) -> Bool[Tensor, "B M"] | None:
        """Mask of the M committed entries that are real; None if all are."""
        return prefix_mask(self.tree_cache.lengths, self.prompt_mask, self.tree_cache.append_index, self.head.device)

    def keep(self, lengths: Sequence[int]) -> None:
        """Commits the first `lengths[r]` entries of each row that were appended."""
        self.tree_cache.keep([range(length) for length in lengths])

    def keep_all(self) -> None:
        """Commits everything that was appended."""
        self.tree_cache.commit_appended()

    def drop(self) -> None:
        """Forgets everything that was appended."""
        self.tree_cache.restore()

    def resumed(self, num_entries: int, num_new: int) -> HeadCache | None:
        """The cache of the next turn, which adds `num_new` entries after the first `num_entries` of this one.

        It has one row, and takes over the entries: this object must not be used any more. None if this cache has fewer
        entries, or lacks the start of the text.
        """
        if self._shifts != [0] or self.prompt_mask is not None or self.tree_cache.append_index < num_entries:
            return None
        self.tree_cache.truncate([num_entries])
        return HeadCache(
            self.head,
            None,
            torch.arange(num_entries, num_entries + num_new, dtype=torch.long, device="cpu")[None],
            self.tree_cache,
        )

    def _shift_column(self) -> Int[Tensor, "B 1"]:
        return to_device(self._shifts, self.head.device)[:, None]

    def _metadata(self, plan: TreePlan, num_cached: int = 0, real: Tensor | None = None) -> AttentionMetadata:
        cache, device = self.tree_cache, self.head.device
        return AttentionMetadata(
            plan, cache.lengths, cache.append_index, device, num_cached, self.prompt_mask, self.next_positions(), real
        )

    def _masks(self, metadata: AttentionMetadata) -> list[Tensor | None]:
        """Masks of a forward over the new nodes, one per layer."""
        plan = metadata.plan
        is_chain = plan.num_nodes == plan.max_depth + 1
        is_step = is_chain and plan.num_nodes == metadata.num_cached + 1
        if is_step and metadata.visible_prefix is None and not self.has_windows:
            return [None] * len(self._layers)
        return [metadata.additive(layer, self.head.dtype) for layer in self._layers]


def _of_one_kind(positions: Int[Tensor, "*kinds B J"]) -> Int[Tensor, "B J"]:
    """Positions of the first kind, where there are several."""
    return positions if positions.dim() == 2 else positions[0]


def _causal(count: int) -> TreePlan:
    """The plan of a chain. It is neither built node by node nor cached, as prompts are long and of many lengths."""
    ancestors = torch.ones(1, count, count, dtype=torch.bool, device="cpu").tril()
    return TreePlan(
        depths=torch.arange(count, dtype=torch.long, device="cpu")[None], ancestors=ancestors, max_depth=count - 1
    )
