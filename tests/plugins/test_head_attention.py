"""Attention of heads with the query heads of a KV head as more rows of it, and the shares of the best children."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_speculate_plugins.heads import head
from hf_speculate_plugins.heads.head import folded_attention
from hf_speculate_plugins.trees import log_shares


@pytest.mark.parametrize("rows_of_mask", [1, 2])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_it_is_attention_of_grouped_heads(monkeypatch, num_kv_heads, rows_of_mask):
    def as_on_a_gpu(*args, **kwargs):  # where heads lie within tokens
        found = scaled_dot_product_attention(*args, **kwargs)
        return found.transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(head, "scaled_dot_product_attention", as_on_a_gpu)
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 5, 6, 8).transpose(1, 2), torch.randn(2, num_kv_heads, 16, 8)
    values, mask = torch.randn_like(keys), torch.randn(rows_of_mask, 1, 5, 16)
    expected = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(folded_attention(queries, keys, values, mask), expected)


@pytest.mark.gpu
def test_shares_on_a_gpu_are_those_of_a_cpu():
    scores = torch.randn(2, 3, 4096, generator=torch.Generator().manual_seed(0))
    for found, expected in zip(log_shares(scores.cuda(), 5), log_shares(scores, 5), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
