"""Attention metadata of a forward: where its new entries go, and which entries each of them sees.

It holds for the target, for a draft model and for heads. A chain is a tree of width one, and so is the next part of a
prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..target import LayerType
from ..transfers import to_device
from ..tree import DraftTree, TreePlan, node_depths
from .prefix import num_left_padding, prefix_mask
from .ranges import Ranges, ranges_of_trees


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """The new entries of one forward: the nodes of a tree from `num_cached` on, after the entries of the text.

    The first `num_prefix` entries of the cache hold the text. Rows are as long as the longest one: entries after a
    row's own length are holes. Node j of every row is entry `num_prefix + j`. In its row's text it follows
    `lengths[r] + depth` entries, left padding included.

    Attributes:
        tree: draft tree of the present rows, or its structure alone.
        lengths: number of committed entries of each row.
        num_prefix: number of entries before the tree.
        device: device of the forward.
        num_cached: number of leading nodes that are in the cache already. The other nodes are new.
        prompt_mask: bool [R, P], the real entries among the first P; None if all are.
        root_positions: position id of a node of depth 0, by row.
        real_nodes: bool [R, N], the nodes that are real; None if all are. Others are padding within a prompt.
        starts: index of the first real entry of each row, in prompts without other missing entries; None if some have
            them, or it is not known.
    """

    tree: DraftTree | TreePlan
    lengths: Sequence[int]
    num_prefix: int
    device: torch.device
    num_cached: int = 0
    prompt_mask: Bool[Tensor, "R P"] | None = None
    root_positions: Sequence[int] = ()
    real_nodes: Bool[Tensor, "R N"] | None = None
    starts: Sequence[int] | None = None
    _masks: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict, init=False)

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes

    @cached_property
    def plan(self) -> TreePlan:
        """The nodes among themselves. A tree on the host may need none, so it is made when it is asked for."""
        return self.tree if isinstance(self.tree, TreePlan) else self.tree.plan

    @property
    def is_ragged(self) -> bool:
        """Whether some row lacks entries among the first `num_prefix`."""
        return self.prompt_mask is not None or min(self.lengths) < self.num_prefix

    @cached_property
    def visible_prefix(self) -> Bool[Tensor, "R M"] | None:
        """The real ones of the M entries before the tree; None if all are."""
        return prefix_mask(self.lengths, self.prompt_mask, self.num_prefix, self.device)

    def positions(self) -> Int[Tensor, "R n"]:
        """Position ids of the new nodes."""
        roots = [[position] for position in self.root_positions]
        if self.num_nodes == 1:
            return to_device(roots, self.device)
        if isinstance(self.tree, DraftTree) and self.tree.is_small:
            new_depths = [node_depths(parents)[self.num_cached :] for parents in self.tree.host.parents]
            of_rows = zip(self.root_positions, new_depths, strict=True)
            return to_device([[root + depth for depth in depths] for root, depths in of_rows], self.device)
        depths = self.plan.depths[:, self.num_cached :]
        return to_device(to_device(roots, depths.device) + depths, self.device)

    def visible_ranges(self) -> Ranges:
        """The visible ranges of each node (`ranges_of_trees`), for the kernel for packed weights.

        They need a whole tree, known `starts`, and layers that see all of the text.
        """
        assert self.starts is not None
        assert isinstance(self.tree, DraftTree)
        return ranges_of_trees(self.tree.host.parents, self.starts, self.lengths, self.num_prefix)

    def additive(self, layer_type: LayerType, dtype: torch.dtype, first: int = 0) -> Float[Tensor, "Q 1 n S"]:
        """The additive mask of the new nodes in layers of one type: 0 or the smallest number of `dtype`.

        Args:
            first: entries of the text that the layer's cache no longer shows.

        Returns:
            Columns are the other entries of the text, then all nodes. Q is 1 if rows do not differ.
        """
        mask = self._unwindowed(dtype, first)
        if not layer_type.hides_any(self.num_prefix + self.plan.max_depth + 1):
            return mask
        return mask.masked_fill(self._too_far(layer_type, first)[:, None], torch.finfo(dtype).min)

    def _unwindowed(self, dtype: torch.dtype, first: int) -> Tensor:
        """The mask of layers that see all of the text; layers of several types share it."""
        if (dtype, first) not in self._masks:
            self._masks[dtype, first] = self._made(dtype, first)
        return self._masks[dtype, first]

    def _made(self, dtype: torch.dtype, first: int) -> Tensor:
        visible, plan, num_prefix = self.visible_prefix, self.plan, self.num_prefix - first
        differ = visible is not None or self.real_nodes is not None
        shape = len(self.lengths) if differ else len(plan.depths), 1, plan.num_nodes - self.num_cached
        mask = torch.zeros(*shape, num_prefix + plan.num_nodes, dtype=dtype, device=self.device)
        low = torch.finfo(dtype).min
        if visible is not None:
            mask[..., :num_prefix].masked_fill_(~visible[:, None, None, first:], low)
        mask[..., num_prefix:] = plan.bias(dtype, self.device)[:, None, self.num_cached :]
        if self.real_nodes is not None:
            mask[..., num_prefix:].masked_fill_(~self.real_nodes[:, None, None], low)
        return mask

    def _too_far(self, layer_type: LayerType, first: int) -> Bool[Tensor, "R n S"]:
        """The entries outside the window of each new node."""
        lengths = to_device(list(self.lengths), self.device)[:, None]
        nodes = lengths + to_device(self.plan.depths, self.device)
        prefix = torch.arange(first, self.num_prefix, device=self.device, dtype=torch.long).expand(len(nodes), -1)
        padding = num_left_padding(self.prompt_mask, self.device)
        return layer_type.too_far(torch.cat([prefix, nodes], dim=1), nodes[:, self.num_cached :], padding)


@dataclass
class TreeMask:
    """A placeholder for the mask of a forward over whole trees, which is built only if the forward needs one.

    Building and decoding a real mask takes a tenth of a small model's forward.

    Attributes:
        metadata: metadata of the forward, which has `visible_ranges`.
        make: function that builds the mask.
        is_made: whether the mask was built.
    """

    metadata: AttentionMetadata
    make: Callable[[], Any]
    is_made: bool = False

    def build(self) -> Any:
        """The real mask, for a forward that needs one."""
        self.is_made = True
        return self.make()
