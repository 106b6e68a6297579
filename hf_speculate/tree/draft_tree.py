"""Draft trees: the tokens that a round proposes, and their structure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import DrafterError
from ..transfers import to_device
from .host_copy import HostCopy
from .host_tree import HostTree, TreeRow
from .plan import PADDING_PARENT, ROOT_PARENT, TreePlan


_FEW = 128  # nodes of a batch, see `DraftTree.is_small`


class HostFacts(NamedTuple):
    """The loop's knowledge of a tree on a device that it has not read, and so not checked.

    Attributes:
        roots: token id of each row's node 0, whatever the tree has there.
        vocab_size: number of token ids that the target has embeddings for.
    """

    roots: Sequence[int]
    vocab_size: int


class DraftTree:
    """Draft tokens of one round for a batch. Rows have their own tokens, and share a structure or have their own.

    The drafter puts its best nodes first: the first n nodes are its tree of n nodes. The decoding loop cuts the tree
    there (`first`) where a smaller tree pays better.

    Args:
        token_ids: int64 [B, N]; node 0 of every row is the root.
        parents: index of each node's parent. One sequence of N parents shared by all rows, a list of B such sequences,
            or an int64 tensor [B, N] (or [1, N]) that stays on its device. `parents[0] == -1`, `parents[i] < i`.
            Padding nodes have parent -2 and are never accepted.
        max_depth: upper bound of the depth. It is required with a tensor of parents, which is not read back from the
            device.
        plan: plan of `parents`; None computes it on first use.
        values: float [B, N] on the device of `token_ids`: log-probability, by the drafter's estimate, that the whole
            path to a node is right. It is 0 for the root and never rises along a path; padding may have any value. None
            means no estimate, and only the order of the nodes counts.

    Attributes:
        batch_size, num_nodes: numbers of rows, and of nodes in each.
        unread: set while the tensors may hold anything; forwards run the tree `clamped`.
    """

    unread: HostFacts | None = None

    def __init__(
        self,
        token_ids: Int[Tensor, "B N"],
        parents: Sequence[int] | Sequence[Sequence[int]] | Int[Tensor, "R N"],
        max_depth: int | None = None,
        plan: TreePlan | None = None,
        values: Float[Tensor, "B N"] | None = None,
    ):
        if isinstance(parents, Tensor) and max_depth is None:
            raise DrafterError("a draft tree with a tensor of parents needs max_depth, an int known on the host.")
        self.token_ids = token_ids
        self.batch_size, self.num_nodes = token_ids.shape
        self.values = values
        self.parents: Tensor | tuple[tuple[int, ...], ...]
        self.parents = parents if isinstance(parents, Tensor) else _as_rows(parents)
        self._max_depth = max_depth if isinstance(parents, Tensor) else None
        self._plan = plan
        self._slots: dict[int, int] | None = None

    @classmethod
    def root_only(cls, root_ids: Int[Tensor, " B"]) -> DraftTree:
        """A tree without a draft: scoring it is a plain decoding step."""
        return cls(root_ids[:, None], (ROOT_PARENT,))

    @classmethod
    def chain(cls, token_ids: Int[Tensor, "B N"], values: Float[Tensor, "B N"] | None = None) -> DraftTree:
        """A tree with one branch: node i is the child of node i - 1. It is the plain reference for all other trees."""
        return cls(token_ids, range(-1, token_ids.shape[1] - 1), values=values)

    @classmethod
    def from_rows(cls, rows: Sequence[TreeRow | tuple[Sequence[int], Sequence[int]]]) -> DraftTree:
        """A batch from one (tokens, parents) pair a row, padded to the widest row. It has values if all rows have."""
        nodes = [row if isinstance(row, TreeRow) else TreeRow(row[0], row[1]) for row in rows]
        width = max(len(row.token_ids) for row in nodes)
        missing = [width - len(row.token_ids) for row in nodes]
        token_ids = [[*row.token_ids, *[row.token_ids[0]] * n] for row, n in zip(nodes, missing, strict=True)]
        parents = [[*row.parents, *[PADDING_PARENT] * n] for row, n in zip(nodes, missing, strict=True)]
        known = [[*row.values, *[0.0] * n] for row, n in zip(nodes, missing, strict=True) if row.values is not None]
        values = torch.tensor(known, dtype=torch.float32, device="cpu") if len(known) == len(nodes) else None
        return cls(torch.tensor(token_ids, dtype=torch.long, device="cpu"), parents, values=values)

    @property
    def plan(self) -> TreePlan:
        """The structure in the form that a forward needs."""
        if self._plan is None:
            if not isinstance(self.parents, Tensor):
                self._plan = TreePlan.from_parents(self.parents)
            elif self.is_small:
                self._plan = TreePlan.from_parents(self.host.parents[: len(self.parents)])
            else:
                self._plan = TreePlan.from_tensor(self.parents, self.max_depth)
        return self._plan

    @cached_property
    def host_copy(self) -> HostCopy:
        """The transfer of the tree from its device to Python lists."""
        return HostCopy(self.token_ids, self.parents, self.values)

    @property
    def host(self) -> HostTree:
        """Tokens, parents and values as Python lists."""
        return self.host_copy.host

    @property
    def clamped(self) -> DraftTree:
        """The tree on its device, with values on which no kernel can fail. A valid tree stays the same."""
        return self if self.unread is None else self._clamped

    @cached_property
    def _clamped(self) -> DraftTree:
        assert self.unread is not None
        roots, vocab_size = self.unread
        tokens, parents = self.token_ids, self.parents
        first = to_device(roots, tokens.device)[:, None]
        tokens = torch.cat([first, tokens[:, 1:].clamp(0, vocab_size - 1)], dim=1)
        if isinstance(parents, Tensor):
            before = torch.arange(parents.shape[1], device=parents.device, dtype=torch.long) - 1
            parents = torch.minimum(parents.clamp(min=PADDING_PARENT), before)
        tree = DraftTree(tokens, parents, self._max_depth, values=self.values)
        tree._slots = self._slots
        tree.host_copy.through(self.host_copy, lambda host: host)
        return tree

    def checked(self, token_ids: Int[Tensor, "B N"], max_depth: int, host: HostTree) -> DraftTree:
        """A copy of this tree with checked tokens and depth.

        Args:
            token_ids: int64 [B, N], with the loop's roots as node 0.
            max_depth: depth of the deepest node.
            host: the same tokens and parents as Python lists.
        """
        tree = DraftTree(token_ids, self.parents, max_depth, values=self.values)
        tree._max_depth = max_depth  # of parents on the host, too: known without a plan
        tree.host_copy.host = host
        return tree

    @property
    def max_depth(self) -> int:
        """Upper bound of the depth of a node."""
        if self._max_depth is None:
            self._max_depth = self.plan.max_depth
        return self._max_depth

    @property
    def is_small(self) -> bool:
        """Whether the tree is on the host and so small that Python is faster than tensor operations."""
        return self.token_ids.numel() <= _FEW and not self.host_copy.is_on_device

    def best(self, count: int) -> DraftTree:
        """The tree of the root and the `count` draft nodes with the highest values in each row. Reads the tree from its
        device."""
        values = self.host.values
        if values is None or all(row == sorted(row, reverse=True) for row in values):
            return self.first(count)
        return DraftTree.from_rows([row.best(count) for row in self.host.rows()])

    def first(self, count: int) -> DraftTree:
        """The tree of the root and the first `count` draft nodes."""
        if count + 1 >= self.num_nodes:
            return self
        parents = self.parents
        cut = parents[:, : count + 1] if isinstance(parents, Tensor) else [row[: count + 1] for row in parents]
        tree = self._part(range(self.batch_size), slice(None), cut, count + 1)
        tree._slots = self._slots
        return tree

    def pruned(self, max_depths: Sequence[int]) -> DraftTree:
        """The same tree without the nodes of row r deeper than `max_depths[r]`."""
        rows = zip(self.host.rows(), max_depths, strict=True)
        return DraftTree.from_rows([row.pruned(limit) for row, limit in rows])

    def select(self, rows: Sequence[int]) -> DraftTree:
        """The trees of some rows of the batch, trimmed to the widest of them.

        Nodes keep their numbers. Tensors of the result have only the selected rows; `slot` maps a row of the batch to
        its index there.
        """
        if len(rows) == self.batch_size:
            return self
        selected = self.gather(rows)
        selected._slots = {row: slot for slot, row in enumerate(rows)}
        return selected

    def gather(self, rows: Sequence[int]) -> DraftTree:
        """The trees of any rows in any order, trimmed to the widest of them."""
        index, parents, width = to_device(rows, self.token_ids.device), self.parents, self.num_nodes
        if isinstance(parents, Tensor):
            return self._part(rows, index, parents if len(parents) == 1 else parents.index_select(0, index), width)
        if len(parents) > 1:
            parents = tuple(parents[row] for row in rows)
        width = max(i + 1 for row in parents for i, parent in enumerate(row) if parent != PADDING_PARENT)
        return self._part(rows, index, [row[:width] for row in parents], width)

    def _part(self, rows: Sequence[int], index: slice | Tensor, parents: Any, width: int) -> DraftTree:
        """The first `width` nodes of some rows; `index` selects the same rows from tensors."""
        values = None if self.values is None else self.values[index, :width]
        tree = DraftTree(self.token_ids[index, :width], parents, self._max_depth, values=values)
        tree.host_copy.through(self.host_copy, lambda host: host.part(rows, width))
        if self.unread is not None:
            tree.unread = self.unread._replace(roots=[self.unread.roots[row] for row in rows])
        return tree

    @property
    def rows(self) -> Sequence[int]:
        """Indices of the batch rows that the tree contains."""
        return range(self.batch_size) if self._slots is None else tuple(self._slots)

    def slot(self, row: int) -> int:
        """The index of a batch row in `token_ids` and in everything computed from them."""
        return row if self._slots is None else self._slots[row]


def _as_rows(parents: Sequence[int] | Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    if parents and isinstance(parents[0], int):
        return (tuple(parents),)  # type: ignore[arg-type]
    return tuple(map(tuple, parents))  # type: ignore[arg-type]
