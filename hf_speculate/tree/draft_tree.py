"""Draft trees: the tokens that a round proposes, and their structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import DrafterError
from ..transfers import to_device
from .host_tree import HostTree, TreeRow
from .plan import PADDING_PARENT, ROOT_PARENT, TreePlan


_FEW = 128  # nodes of a batch, see `DraftTree.is_small`


class DraftTree:
    """Draft tokens of one round for a batch: every row has its own tokens, and its own structure or a shared one.

    Nodes come in the order of their worth: the first n of them are the drafter's tree of n nodes, and the decoding loop
    cuts trees there (`first`) where a smaller one pays better.

    Args:
        token_ids: int64 [B, N], node 0 of every row is the root.
        parents: structure. One sequence of N parents shared by all rows, a list of B such sequences, or an int64
            tensor [B, N] (or [1, N]) that stays where it is. `parents[0] == -1`, `parents[i] < i`; padding nodes of
            ragged batches have parent -2 and are never accepted.
        max_depth: upper bound of the depth; needed with a tensor of parents (it is not read back from the device).
        plan: of these parents, where it is known already.
        values: float [B, N], log-probability that the path to a node is right, as the drafter sees it: 0 for the root,
            never rising along a path; of padding anything. On the device of `token_ids`. None: the drafter does not
            say, and the order of the nodes is all that is known.
    """

    def __init__(
        self,
        token_ids: Int[Tensor, "B N"],
        parents: Sequence[int] | Sequence[Sequence[int]] | Int[Tensor, "R N"],
        max_depth: int | None = None,
        plan: TreePlan | None = None,
        values: Float[Tensor, "B N"] | None = None,
    ):
        self.token_ids = token_ids
        self.values = values
        self._plan = plan
        self._device_parents: Tensor | None = None
        self._max_depth: int | None = None
        if isinstance(parents, Tensor):
            if max_depth is None:
                raise DrafterError("a draft tree with a tensor of parents needs max_depth, an int known on the host.")
            self._device_parents = parents
            self._max_depth = max_depth
        else:
            self._host_parents = _as_rows(parents)
        self._slots: dict[int, int] | None = None
        self._source: tuple[DraftTree, Callable[[HostTree], HostTree]] | None = None

    @classmethod
    def root_only(cls, root_ids: Int[Tensor, " B"]) -> DraftTree:
        """A tree without a draft: the forward over it is a plain decoding step."""
        return cls(root_ids[:, None], (ROOT_PARENT,))

    def root_alone(self) -> DraftTree:
        """The root of every row, without a draft."""
        tree = self.root_only(self.token_ids[:, 0])
        tree._slots = self._slots
        return tree

    @classmethod
    def chain(cls, token_ids: Int[Tensor, "B N"], values: Float[Tensor, "B N"] | None = None) -> DraftTree:
        """One branch: node i is the child of node i - 1. The plain reference of every other shape."""
        return cls(token_ids, range(-1, token_ids.shape[1] - 1), values=values)

    @classmethod
    def from_rows(cls, rows: Sequence[TreeRow | tuple[Sequence[int], Sequence[int]]]) -> DraftTree:
        """A batch from one (tokens, parents) pair a row, padded to the widest row. Where all have values, so has it."""
        nodes = [row if isinstance(row, TreeRow) else TreeRow(row[0], row[1]) for row in rows]
        width = max(len(row.token_ids) for row in nodes)
        missing = [width - len(row.token_ids) for row in nodes]
        token_ids = [[*row.token_ids, *[row.token_ids[0]] * n] for row, n in zip(nodes, missing, strict=True)]
        parents = [[*row.parents, *[PADDING_PARENT] * n] for row, n in zip(nodes, missing, strict=True)]
        known = [[*row.values, *[0.0] * n] for row, n in zip(nodes, missing, strict=True) if row.values is not None]
        values = torch.tensor(known) if len(known) == len(nodes) else None
        return cls(torch.tensor(token_ids), parents, values=values)

    @property
    def plan(self) -> TreePlan:
        if self._plan is None:
            if self._device_parents is None:
                self._plan = TreePlan.from_parents(self._host_parents)
            elif self.is_small:
                self._plan = TreePlan.from_parents(self.host.parents[: len(self._device_parents)])
            else:
                self._plan = TreePlan.from_tensor(self._device_parents, self.max_depth)
        return self._plan

    @property
    def parents_on_device(self) -> Tensor:
        """int64 [R, N], of a tree that was made with a tensor of them."""
        assert self._device_parents is not None
        return self._device_parents

    @property
    def parents_as_given(self) -> Tensor | Sequence[Sequence[int]]:
        """int64 [R, N], a tensor or rows on the host; R is 1 (all rows share it) or B."""
        return self._host_parents if self._device_parents is None else self._device_parents

    def rebuilt(self, token_ids: Int[Tensor, "B N"], max_depth: int, host: HostTree) -> DraftTree:
        """A tree of the same structure, whose plan is made anew.

        Args:
            token_ids: of its nodes.
            max_depth: the depth of its deepest node.
            host: its tokens and parents on the host.
        """
        new = object.__new__(DraftTree)
        vars(new).update(vars(self), token_ids=token_ids, _plan=None, _max_depth=max_depth, host=host, _source=None)
        return new

    def seen_through(self, source: DraftTree, change: Callable[[HostTree], HostTree]) -> DraftTree:
        """This tree, whose `host` will be `change` of `source`'s: so that what was made from it is not read again.

        Whatever `change` raises is raised where `host` is asked for first.
        """
        self._source = source, change
        return self

    @property
    def is_derived(self) -> bool:
        """Whether its tokens and parents are read by those of another tree."""
        return self._source is not None

    @property
    def batch_size(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_nodes(self) -> int:
        return self.token_ids.shape[1]

    @property
    def max_depth(self) -> int:
        """Upper bound of the depth of a node."""
        if self._max_depth is None:
            self._max_depth = self.plan.max_depth
        return self._max_depth

    @cached_property
    def host(self) -> HostTree:
        """Tokens and parents as Python lists; what is on a device is read back here, or by `read_with`."""
        if self._source is not None:
            source, change = self._source
            return change(source.host)
        return self._as_host(_read(self._tensors))

    def read_with(self, table: Int[Tensor, "R K"]) -> list[list[int]]:
        """`table` as lists; a tree that is on their device is read in the same transfer, for `host`: a second transfer
        would be a second wait for the device."""
        tree = self
        while tree._source is not None and "host" not in vars(tree):
            tree = tree._source[0]
        own = tree._tensors
        if "host" in vars(tree) or any(tensor.device != table.device for tensor in own):
            return table.tolist()
        rows, *read = _read([table, *own])
        tree.host = tree._as_host(read)
        return rows

    @property
    def _tensors(self) -> list[Tensor]:
        """The tensors that `host` is read from."""
        return [t for t in (self.token_ids, self._device_parents, self.values) if t is not None]

    def _as_host(self, read: Sequence[list[list[Any]]]) -> HostTree:
        """Args: read: `_tensors` as lists."""
        rest = list(read)
        tokens, values = rest.pop(0), None if self.values is None else rest.pop()
        rows = [list(row) for row in (rest.pop() if rest else self._host_parents)]
        return HostTree(tokens, rows if len(rows) == len(tokens) else rows * len(tokens), values)

    @property
    def is_on_device(self) -> bool:
        """Whether looking at it means to wait for a device."""
        return any(tensor.device.type != "cpu" for tensor in self._tensors)

    @property
    def is_small(self) -> bool:
        """Whether it is on the host, with so few nodes that Python is faster than tensor operations."""
        return self.token_ids.numel() <= _FEW and not self.is_on_device

    def best(self, count: int) -> DraftTree:
        """The tree of the root and, of each row, the `count` draft nodes of the highest values; reads it."""
        values = self.host.values
        if values is None or all(row == sorted(row, reverse=True) for row in values):
            return self.first(count)
        return DraftTree.from_rows([row.best(count) for row in self.host.rows()])

    def first(self, count: int) -> DraftTree:
        """The tree of the root and the first `count` draft nodes."""
        if count + 1 >= self.num_nodes:
            return self
        tokens, values = self.token_ids[:, : count + 1], self._part_of_values(slice(None), count + 1)
        if self._device_parents is None:
            tree = DraftTree(tokens, [row[: count + 1] for row in self._host_parents], values=values)
        else:
            tree = DraftTree(tokens, self._device_parents[:, : count + 1], self._max_depth, values=values)
        return tree.seen_through(self, lambda host: host.part(range(len(tokens)), count + 1))

    def _part_of_values(self, rows: slice | Tensor, width: int) -> Tensor | None:
        return None if self.values is None else self.values[rows, :width]

    def pruned(self, max_depths: Sequence[int]) -> DraftTree:
        """The same tree with the nodes of row r below `max_depths[r]` cut off (turned to padding and trimmed)."""
        rows = zip(self.host.rows(), max_depths, strict=True)
        return DraftTree.from_rows([row.pruned(limit) for row, limit in rows])

    def with_chains(self, chains: Mapping[int, Sequence[int]]) -> DraftTree:
        """The same tree with chains of these tokens, root first, instead of what some rows hold; these are sure."""
        rows = self.host.rows()
        for row, tokens in chains.items():
            rows[row] = TreeRow(tokens, range(-1, len(tokens) - 1), [0.0] * len(tokens))
        return DraftTree.from_rows(rows)

    def select(self, rows: Sequence[int]) -> DraftTree:
        """The trees of some rows of the batch, as wide as the widest of them; to be scored as they are.

        Nodes keep their numbers. Everything of the result goes by its B' rows; `slot` tells which one a row has become.
        """
        if len(rows) == self.batch_size:
            return self
        selected = self.gather(rows)
        selected._slots = {row: slot for slot, row in enumerate(rows)}
        return selected

    def gather(self, rows: Sequence[int]) -> DraftTree:
        """The trees of any rows in any order, as wide as the widest of them."""
        index = to_device(rows, self.token_ids.device)
        tokens, parents = self.token_ids.index_select(0, index), self._device_parents
        if parents is not None:
            parents = parents if parents.shape[0] == 1 else parents.index_select(0, index)
            values = self._part_of_values(index, self.num_nodes)
            tree = DraftTree(tokens, parents, self._max_depth, values=values)
            return tree.seen_through(self, lambda host: host.part(rows, self.num_nodes))
        of_rows = self._host_parents
        if len(of_rows) > 1:
            of_rows = [of_rows[row] for row in rows]
        width = max(i + 1 for row in of_rows for i, parent in enumerate(row) if parent != PADDING_PARENT)
        values = self._part_of_values(index, width)
        tree = DraftTree(tokens[:, :width], [row[:width] for row in of_rows], values=values)
        return tree.seen_through(self, lambda host: host.part(rows, width))

    @property
    def rows(self) -> Sequence[int]:
        """The rows of the batch that the tree has."""
        return range(self.batch_size) if self._slots is None else tuple(self._slots)

    def slot(self, row: int) -> int:
        """The index of a row of the batch in `token_ids`, and in whatever is computed from them."""
        return row if self._slots is None else self._slots[row]


def _read(tensors: Sequence[Tensor]) -> list[list[list[Any]]]:
    """Matrices of int64 and floats as lists; from a device in one transfer: single precision goes as the bits that it
    is."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.tolist() for tensor in tensors]
    is_float = [tensor.is_floating_point() for tensor in tensors]
    words = [_as_words(tensor) if float_ else tensor for tensor, float_ in zip(tensors, is_float, strict=True)]
    parts = torch.cat([tensor.flatten() for tensor in words]).cpu().split([tensor.numel() for tensor in tensors])
    return [
        (part.int().view(torch.float32) if float_ else part).view(tensor.shape).tolist()
        for part, tensor, float_ in zip(parts, tensors, is_float, strict=True)
    ]


def _as_words(values: Tensor) -> Tensor:
    return values.detach().float().contiguous().view(torch.int32).long()


def _as_rows(parents: Sequence[int] | Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    rows: list[tuple[int, ...]] = []
    shared: list[int] = []
    for item in parents:
        if isinstance(item, int):
            shared.append(item)
        else:
            rows.append(tuple(item))
    return tuple(rows) if rows else (tuple(shared),)
