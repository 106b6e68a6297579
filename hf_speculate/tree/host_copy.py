"""The transfer of a draft tree from its device to Python lists, done once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from .host_tree import HostTree


class HostCopy:
    """Reads a tree's tokens, parents and values on first use.

    Args:
        token_ids: int64 [B, N].
        parents: int64 [R, N], or Python lists; R is 1 or B.
        values: float [B, N]; None if the tree has no values.
    """

    def __init__(self, token_ids: Tensor, parents: Tensor | Sequence[Sequence[int]], values: Tensor | None):
        on_device = parents if isinstance(parents, Tensor) else None
        self._tensors = [tensor for tensor in (token_ids, on_device, values) if tensor is not None]
        self._parents = None if isinstance(parents, Tensor) else parents
        self._has_values = values is not None
        self._source: tuple[HostCopy, Callable[[HostTree], HostTree]] | None = None

    def through(self, source: HostCopy, change: Callable[[HostTree], HostTree]) -> HostCopy:
        """This copy, changed to apply `change` to what `source` reads, so that nothing is read twice.

        An error of `change` is raised where the lists are first used.
        """
        self._source = source, change
        return self

    @property
    def is_derived(self) -> bool:
        """Whether the lists come from another tree's copy."""
        return self._source is not None

    @property
    def is_on_device(self) -> bool:
        """Whether the host must wait for a device to read the tree."""
        return any(tensor.device.type != "cpu" for tensor in self._tensors)

    @cached_property
    def host(self) -> HostTree:
        """The tree as Python lists."""
        if self._source is not None:
            source, change = self._source
            return change(source.host)
        return self._as_host(_read(self._tensors))

    def read_with(self, table: Int[Tensor, "R K"]) -> list[list[int]]:
        """`table` as lists. A tree on the same device is read in the same transfer, so that the host waits only
        once."""
        origin = self
        while origin._source is not None and "host" not in vars(origin):
            origin = origin._source[0]
        if "host" in vars(origin) or any(tensor.device != table.device for tensor in origin._tensors):
            return table.tolist()
        rows, *lists = _read([table, *origin._tensors])
        origin.host = origin._as_host(lists)
        return rows

    def supply(self, lists: Sequence[list[list[Any]]], count: int) -> None:
        """Takes tokens, parents and values of the first `count` nodes from another transfer; padding may follow."""
        origin = self._origin
        tokens, parents, values = lists
        parts = [tokens, *([parents] if origin._parents is None else []), *([values] if origin._has_values else [])]
        host = origin._as_host(parts).part(range(len(tokens)), count)
        if count >= origin._tensors[0].shape[1]:
            origin.host = host
        self.host = self._changed(host)

    def _changed(self, host: HostTree) -> HostTree:
        """The lists of this copy, from those of the copy that it comes from."""
        if self._source is None:
            return host
        source, change = self._source
        return change(source._changed(host))

    @property
    def _origin(self) -> HostCopy:
        return self if self._source is None else self._source[0]._origin

    def _as_host(self, lists: Sequence[list[list[Any]]]) -> HostTree:
        """The tree from `lists`, the contents of `_tensors` as Python lists."""
        rest = list(lists)
        tokens, values = rest.pop(0), rest.pop() if self._has_values else None
        rows = [list(row) for row in (rest.pop() if self._parents is None else self._parents)]
        return HostTree(tokens, rows if len(rows) == len(tokens) else rows * len(tokens), values)


def _read(tensors: Sequence[Tensor]) -> list[list[list[Any]]]:
    """int64 and float matrices as lists. They leave a device in one transfer, floats as their 32 bits."""
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
