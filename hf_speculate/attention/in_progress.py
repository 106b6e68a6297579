"""The attention of the forward in progress, where a mask cannot say what nodes see.

Modules pass on the sentinel, a mask without rows. An attention that gets it asks here what computes the layer, and so
learns what each node sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor


StockAttention: TypeAlias = Callable[..., tuple[Tensor, Any]]
"""An attention function of transformers. It takes a module, query [B, heads, N, D], key and value [B, KV heads, S, D],
and a mask."""


class NodeAttention(Protocol):
    """Attention over the nodes of one tree, which knows what each of them sees."""

    def attend(
        self, stock: StockAttention, module: Any, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """The result of `stock` with the mask of the tree: [B, N, heads, D] and None."""
        ...


_current: ContextVar[NodeAttention | None] = ContextVar("hf_speculate_attention", default=None)


@contextmanager
def attending(attention: NodeAttention, device: torch.device) -> Iterator[Tensor]:
    """A context for a forward on this thread whose layers attend by `attention`; gives the sentinel, its mask."""
    token = _current.set(attention)
    try:
        yield torch.empty(1, 1, 0, 0, device=device, dtype=torch.float32)
    finally:
        _current.reset(token)


def is_sentinel(mask: Any) -> bool:
    """Whether a mask is the one of `attending`. Traced graphs of other forwards run only this check."""
    return isinstance(mask, Tensor) and mask.dim() == 4 and not mask.shape[2]


def attention_in_progress() -> NodeAttention:
    """The attention of the forward in progress on this thread."""
    attention = _current.get()
    assert attention is not None
    return attention
