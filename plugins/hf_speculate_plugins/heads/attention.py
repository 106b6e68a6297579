"""Attention of a head over its cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache


class CachedAttention:
    """`attend` of a forward that appends to a cache.

    Args:
        cache: keys and values of earlier entries; those of the forward are appended.
        masks: additive, for each layer [B, 1, N, M + N], or None: every entry sees all.
        is_causal: causal mask instead, for an empty cache.
    """

    def __init__(self, cache: Cache, masks: Sequence[Tensor | None] | None = None, is_causal: bool = False):
        self.cache, self.masks, self.is_causal = cache, masks, is_causal

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = self.cache.update(keys, values, layer)
        mask = None if self.masks is None else self.masks[layer]
        return scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=self.is_causal,
            enable_gqa=keys.shape[1] != queries.shape[1],
        )
