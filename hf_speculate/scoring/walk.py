"""Attention and products of a tree bit for bit as those of one token after another.

Norms, rotary embeddings and activations go row by row; so do products of 16 bit, up to a number of rows that `exact`
finds. What is left is attention: many queries under a mask take another path through the kernels than one query over
all its keys. Here every node is attended for as stock does it for a single token: one call with one query, over keys
that lie one behind the other: the prefix, its ancestors, itself. The tree is walked depth first; of the entries behind
the prefix only those are written anew that are another node's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface


Attention: TypeAlias = Callable[..., tuple[Tensor, Any]]
"""As transformers calls it: of a module, query [B, heads, N, D], key, value [B, KV heads, S, D], and a mask."""


Sizes = Mapping[tuple[int, ...], Sequence[int]]
"""Of the weight of a product [out, in]: numbers of rows that give each row the bits that it has alone, falling."""


Visit = tuple[int, int]
"""A node, and where its entry belongs behind the committed ones of its row: at its depth."""


@dataclass(frozen=True)
class Walk:
    """The order in which the attentions of one forward over a tree go from node to node.

    Attributes:
        base: entries before the first node's.
        visits: of every row, parents before children, each branch to its end.
        lengths: committed entries of every row.
        prompt_mask: bool [R, M0], see `Scorer`; None where stock has no padding to hide.
        windows: of every layer the entries that a token sees, itself included, None for all; empty: no layer has one.
        mask_dtype: of the mask that is added to all scores (eager); None: stock masks only where it has to.
    """

    base: int
    visits: Sequence[Sequence[Visit]]
    lengths: Sequence[int]
    prompt_mask: Tensor | None = None
    windows: Sequence[int | None] = ()
    mask_dtype: torch.dtype | None = None
    _masks: dict[tuple[Any, ...], Tensor | None] = field(default_factory=dict, init=False)

    def attend(
        self, stock: Attention, module: Any, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Stock's attention of every node by itself.

        Args:
            query: [R, heads, N, D]; key, value: [R, KV heads, S, D], views of the cache up to the last node's entry,
                left as they were.
        Returns:
            [R, N, heads, D] and None.
        """
        rows, heads, num_nodes, _ = query.shape
        window = self.windows[module.layer_idx] if self.windows else None
        hidden = self.base + num_nodes - key.shape[2]  # entries that a windowed layer has let go
        queries = query.transpose(1, 2).contiguous()[:, :, :, None]  # [R, N, heads, 1, D]
        outputs = []
        for row in range(rows):
            found = [query.new_zeros(1, 1, heads, value.shape[-1])] * num_nodes
            entries = _Entries(key[row : row + 1], value[row : row + 1], self.base - hidden, self.lengths[row] - hidden)
            for node, place in self.visits[row]:
                keys, values = entries.up_to(node, place, window)
                end = self.lengths[row] + place + 1
                mask = self._mask(row, end - keys.shape[2], end, window, query.device)
                found[node] = stock(module, queries[row : row + 1, node], keys, values, mask, **kwargs)[0]
            entries.restore()
            outputs.append(torch.cat(found, dim=1))
        return torch.cat(outputs) if rows > 1 else outputs[0], None

    def _mask(self, *place: Any) -> Tensor | None:
        """The mask of `_made_mask`, made once for all layers."""
        if place not in self._masks:
            self._masks[place] = self._made_mask(*place)
        return self._masks[place]

    def _made_mask(self, row: int, start: int, end: int, window: int | None, device: torch.device) -> Tensor | None:
        """Stock's mask of one token that sees the entries from `start` to `end`, [1, 1, 1, end - start]."""
        is_full = window is not None and end - start >= window
        if self.prompt_mask is None and self.mask_dtype is None and not is_full:
            return None
        visible = torch.ones(1, end - start, dtype=torch.bool, device=device)
        if self.prompt_mask is not None:
            of_prompt = self.prompt_mask[row : row + 1, start:end]
            visible[:, : of_prompt.shape[1]] = of_prompt
        visible = visible[:, None, None]
        if self.mask_dtype is None:
            return visible
        none = torch.zeros((), dtype=self.mask_dtype, device=device)
        return torch.where(visible, none, torch.finfo(self.mask_dtype).min)


class _Entries:
    """The entries of one row in one layer while its tree is walked.

    Args:
        keys, values: [1, KV heads, base + N, D].
        base: index of node 0.
        length: index behind the committed entries, at most `base`.
    """

    def __init__(self, keys: Tensor, values: Tensor, base: int, length: int):
        self._buffers, self._base, self._length = (keys, values), base, length
        self._saved: tuple[Tensor, ...] = ()
        self._holds = {base + node: node for node in range(keys.shape[2] - base)}

    def up_to(self, node: int, place: int, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the prefix, the node's ancestors, which were visited before it, and its own; the last
        ones, as many as a window has."""
        place += self._length
        if self._holds.get(place) != node:
            if not self._saved:
                self._saved = tuple(buffer[:, :, self._base :].clone() for buffer in self._buffers)
            for buffer, saved in zip(self._buffers, self._saved, strict=True):
                buffer[:, :, place] = saved[:, :, node]
            self._holds[place] = node
        start = 0 if window is None else max(place + 1 - window, 0)
        keys, values = self._buffers
        return keys.narrow(2, start, place + 1 - start), values.narrow(2, start, place + 1 - start)

    def restore(self) -> None:
        """Every node's entry is where the forward has put it."""
        for buffer, saved in zip(self._buffers, self._saved, strict=False):
            buffer[:, :, self._base :] = saved


class RowwiseProducts(TorchFunctionMode):
    """Products of several rows, in pieces whose rows have the bits that they have alone.

    Args:
        sizes: of every weight's shape; of those that are not here any number of rows.
    """

    def __init__(self, sizes: Sizes):
        super().__init__()
        self._sizes = sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and len(args) > 1:
            sizes = self._sizes.get(tuple(args[1].shape))
            if sizes is not None:
                return _in_pieces(args[0], sizes, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _in_pieces(states: Tensor, sizes: Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
    rows = states.reshape(-1, states.shape[-1])
    if len(rows) in sizes or len(rows) == 1:
        return functional.linear(states, *args, **kwargs)
    pieces, start = [], 0
    while start < len(rows):
        size = next((size for size in sizes if size <= len(rows) - start), 1)
        pieces.append(functional.linear(rows[start : start + size], *args, **kwargs))
        start += size
    return torch.cat(pieces).view(*states.shape[:-1], -1)


_walk: ContextVar[Walk | None] = ContextVar("hf_speculate_exact_walk", default=None)


def no_mask(device: torch.device) -> Tensor:
    """The mask of an exact forward: nothing to look at, and not what other forwards have."""
    return torch.empty(1, 1, 1, 0, device=device)


def is_walked(mask: Tensor | None) -> bool:
    """Whether a forward with this mask is an exact one. (Graphs of others, which are traced, ask no more than this.)"""
    return mask is not None and mask.shape[2:] == (1, 0)


def current_walk() -> Walk:
    """The walk of the exact forward that is running on this thread."""
    walk = _walk.get()
    assert walk is not None
    return walk


@contextmanager
def walking(walk: Walk, sizes: Sizes) -> Iterator[None]:
    """Around a forward over a tree: exact attention and products."""
    token = _walk.set(walk)
    try:
        with ExitStack() as around:
            if sizes:
                around.enter_context(RowwiseProducts(sizes))
            if walk.mask_dtype is not None:
                around.enter_context(_eager.walked())
            yield
    finally:
        _walk.reset(token)


class _Eager:
    """Replaces `AttentionInterface.get_interface` while exact forwards run, on whatever threads. Every modeling file
    hands its own "eager" over as the default, so it stands in no table that could be changed instead."""

    def __init__(self) -> None:
        self._lock, self._num_running = Lock(), 0
        self._stock: Any = None

    @contextmanager
    def walked(self) -> Iterator[None]:
        with self._lock:
            self._num_running += 1
            if self._num_running == 1:
                stock = self._stock = AttentionInterface.get_interface

                def interface(self: AttentionInterface, attn_implementation: str, default: Attention) -> Attention:
                    found = stock(self, attn_implementation, default)
                    return _walked(found) if attn_implementation == "eager" else found

                AttentionInterface.get_interface = interface
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                if not self._num_running:
                    AttentionInterface.get_interface = self._stock


_eager = _Eager()


def _walked(stock: Attention) -> Attention:
    """An attention that goes node by node in exact forwards, and is stock's in all others."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        if isinstance(attention_mask, Tensor) and is_walked(attention_mask):
            return current_walk().attend(stock, module, query, key, value, **kwargs)
        return stock(module, query, key, value, attention_mask, **kwargs)

    return attend


def depth_first(parents: Sequence[int]) -> list[Visit]:
    """The nodes of one row, padding left out."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents[1:], start=1):
        children.setdefault(parent, []).append(node)
    order, stack = [], [(0, 0)]
    while stack:
        node, depth = stack.pop()
        order.append((node, depth))
        stack += [(child, depth + 1) for child in reversed(children.get(node, []))]
    return order
