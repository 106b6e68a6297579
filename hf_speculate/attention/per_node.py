"""Attention and matrix products of a tree, bit for bit as for one token after another.

Norms, rotary embeddings and activations treat each row alone. So do 16-bit products, up to a row count that `exact`
finds. Attention does not: many queries under a mask take another path through the kernels than one query over all its
keys. Here each node gets stock's call for a single token: one query over contiguous keys (the prefix, the node's
ancestors, itself). The tree is walked depth first, and only entries that belong to another node are rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .in_progress import StockAttention, attending, attention_in_progress, is_sentinel


Sizes = Mapping[tuple[int, ...], Sequence[int]]
"""Row counts, falling, by weight shape [out, in]. With these counts each row gets the same bits as alone."""


Visit = tuple[int, int]
"""A node and its depth, at which its entry belongs after its row's committed ones."""


@dataclass(frozen=True)
class PerNodeAttention:
    """The order in which one forward over a tree computes the attention of its nodes.

    Attributes:
        base: number of entries before the first node's.
        visits: nodes of every row in order, depth first, parents before children.
        lengths: number of committed entries of every row.
        prompt_mask: bool [R, M0], False for padding (`Scorer`); None if stock has no padding to hide.
        windows: number of entries that a token sees in every layer, itself included; None for all. Empty if no layer
            has a window.
        mask_dtype: dtype of the mask that "eager" adds to all scores; None if stock uses a mask only where it must.
    """

    base: int
    visits: Sequence[Sequence[Visit]]
    lengths: Sequence[int]
    prompt_mask: Tensor | None = None
    windows: Sequence[int | None] = ()
    mask_dtype: torch.dtype | None = None
    _masks: dict[tuple[Any, ...], Tensor | None] = field(default_factory=dict, init=False)

    def attend(
        self, stock: StockAttention, module: Any, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Stock's attention, computed for each node alone.

        Args:
            query: [R, heads, N, D]; key, value: [R, KV heads, S, D], views of the cache up to the last node's entry.
                They are unchanged at the end.

        Returns:
            [R, N, heads, D] and None.
        """
        rows, heads, num_nodes, _ = query.shape
        window = self.windows[module.layer_idx] if self.windows else None
        hidden = self.base + num_nodes - key.shape[2]  # entries that a windowed layer has dropped
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
        """The result of `_made_mask`, cached for all layers."""
        if place not in self._masks:
            self._masks[place] = self._made_mask(*place)
        return self._masks[place]

    def _made_mask(self, row: int, start: int, end: int, window: int | None, device: torch.device) -> Tensor | None:
        """Stock's mask [1, 1, 1, end - start] of one token that sees the entries from `start` to `end`."""
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
    """The entries of one row in one layer while the nodes are computed.

    Args:
        keys, values: [1, KV heads, base + N, D].
        base: index of node 0.
        length: number of committed entries, at most `base`.
    """

    def __init__(self, keys: Tensor, values: Tensor, base: int, length: int):
        self._buffers, self._base, self._length = (keys, values), base, length
        self._saved: tuple[Tensor, ...] = ()
        self._holds = {base + node: node for node in range(keys.shape[2] - base)}

    def up_to(self, node: int, place: int, window: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the prefix, the node's ancestors and itself; at most `window` of the last ones.

        The ancestors must have been visited before.
        """
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
        """Puts every node's entry back where the forward wrote it."""
        for buffer, saved in zip(self._buffers, self._saved, strict=False):
            buffer[:, :, self._base :] = saved


class RowwiseProducts(TorchFunctionMode):
    """Splits products of several rows into pieces whose rows get the same bits as alone.

    Args:
        sizes: trusted row counts by weight shape; weights of other shapes may have any number of rows.
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


@contextmanager
def attending_per_node(attention: PerNodeAttention, sizes: Sizes, device: torch.device) -> Iterator[Tensor]:
    """A context for a forward over a tree with exact attention and products; gives its mask, the sentinel."""
    with ExitStack() as around:
        if sizes:
            around.enter_context(RowwiseProducts(sizes))
        if attention.mask_dtype is not None:
            around.enter_context(_eager.replaced())
        yield around.enter_context(attending(attention, device))


class _Eager:
    """Replaces `AttentionInterface.get_interface` while exact forwards run on any thread.

    Every modeling file passes its own "eager" as the default, so no table holds it.
    """

    def __init__(self) -> None:
        self._lock, self._num_running = Lock(), 0
        self._stock: Any = None

    @contextmanager
    def replaced(self) -> Iterator[None]:
        with self._lock:
            self._num_running += 1
            if self._num_running == 1:
                stock = self._stock = transformers.AttentionInterface.get_interface

                def interface(
                    self: transformers.AttentionInterface, attn_implementation: str, default: StockAttention
                ) -> StockAttention:
                    found = stock(self, attn_implementation, default)
                    return _by_node(found) if attn_implementation == "eager" else found

                transformers.AttentionInterface.get_interface = interface
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                if not self._num_running:
                    transformers.AttentionInterface.get_interface = self._stock


_eager = _Eager()


def _by_node(stock: StockAttention) -> StockAttention:
    """An attention that computes node by node in exact forwards, and as stock in all others."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        if is_sentinel(attention_mask):
            return attention_in_progress().attend(stock, module, query, key, value, **kwargs)
        return stock(module, query, key, value, attention_mask, **kwargs)

    return attend


def depth_first(parents: Sequence[int]) -> list[Visit]:
    """The nodes of one row in depth-first order, without padding."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents[1:], start=1):
        children.setdefault(parent, []).append(node)
    order, stack = [], [(0, 0)]
    while stack:
        node, depth = stack.pop()
        order.append((node, depth))
        stack += [(child, depth + 1) for child in reversed(children.get(node, []))]
    return order
