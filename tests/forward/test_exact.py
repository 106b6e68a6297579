"""What exact scoring is made of: products in pieces, a walk over the tree, and a trial of each model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache

from hf_speculate.attention import per_node
from hf_speculate.attention.per_node import RowwiseProducts, depth_first
from hf_speculate.cache import TreeCache, as_cache
from hf_speculate.forward import exact_scorer, exact_sizes
from hf_speculate.forward.exact import first_difference, product_sizes
from hf_speculate.tree import DraftTree

from ..support.inputs import padded_batch, random_prompt
from ..support.models import VOCAB_SIZE, Experts


def exchange(model):
    model.model.layers[0].mlp = Experts(model.config.hidden_size)


def reshape(model):
    down = model.model.layers[1].mlp.down_proj
    down.weight = nn.Parameter(down.weight.t().contiguous().t(), requires_grad=False)


CHANGES = {
    "more tokens": lambda model: model.resize_token_embeddings(VOCAB_SIZE + 8),
    "another module": exchange,
    "another layout of a weight": reshape,
    "another dtype": lambda model: model.to(torch.float16),
    "another attention": lambda model: model.set_attn_implementation("eager"),
    "another configuration": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    "a forward of somebody's": lambda model: setattr(model.model.norm, "forward", lambda states: states),
}


class TestExactScoring:
    def test_depth_first_orders_nodes_by_path(self):
        assert depth_first([-1, 0, 1, 0, 3, -2, 1]) == [(0, 0), (1, 1), (2, 2), (6, 2), (3, 1), (4, 2)]

    @pytest.mark.parametrize("sizes", [(), (2,), (8, 4, 2), (5,)])
    @pytest.mark.parametrize("rows", [1, 2, 7, 16])
    def test_rowwise_products_multiply_in_pieces(self, sizes, rows, monkeypatch):
        weight, bias, states = torch.randn(6, 4).double(), torch.randn(6).double(), torch.randn(1, rows, 4).double()
        seen, linear = [], torch._C._nn.linear

        def watched(states, *args, **kwargs):
            seen.append(states.numel() // 4)
            return linear(states, *args, **kwargs)

        monkeypatch.setattr(per_node.functional, "linear", watched)
        found = per_node._in_pieces(states, sizes, weight, bias)
        torch.testing.assert_close(found, linear(states, weight, bias))
        assert sum(seen) == rows
        assert all(count in (1, *sizes) for count in seen)

    def test_rowwise_products_split_listed_shapes_only(self):
        states, narrow, wide = torch.randn(5, 8), torch.randn(3, 8), torch.randn(7, 8)
        taken = []
        with RowwiseProducts({(3, 8): (2,)}):
            for weight in (narrow, wide):
                taken.append(functional.linear(states, weight))
        torch.testing.assert_close(taken[0], functional.linear(states, narrow))
        assert torch.equal(taken[1], functional.linear(states, wide))

    def test_product_sizes_give_every_row_its_bits_alone(self):
        """(3 in 10,000 values differ where a kernel changes with the rows: that 200,000 show none has e^-60.)"""
        layer = torch.nn.Linear(4864, 64, bias=False, dtype=torch.bfloat16)
        (sizes,) = product_sizes(layer).values()
        rows = torch.randn(256, 4864).bfloat16()
        with torch.no_grad():
            alone = torch.cat([layer(row[None]) for row in rows])
            for size in sizes:
                for start in range(0, len(rows) - size + 1, size):
                    assert torch.equal(layer(rows[start : start + size]), alone[start : start + size])

    @pytest.mark.parametrize("window", [None, 8])
    @pytest.mark.parametrize("lengths", [(4,), (7,), (20,), (9, 4)])
    def test_per_node_attention_makes_the_calls_of_single_steps(self, tiny_model, lengths, window, monkeypatch):
        """Keys, values and masks; where there is none, none."""
        model, seen = tiny_model("mistral", sliding_window=window), []
        stock = functional.scaled_dot_product_attention
        inputs = padded_batch(random_prompt, lengths)
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        tokens = torch.randint(3, VOCAB_SIZE, (len(lengths), 4))
        for cache in caches:
            model(**inputs, **as_cache(cache))

        def watched(query, key, value, attn_mask=None, **kwargs):
            seen.append((key.clone(), value.clone(), attn_mask))
            return stock(query, key, value, attn_mask=attn_mask, **kwargs)

        monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
        tree = DraftTree(tokens, [-1, 0, 1, 2])
        scorer = exact_scorer(model, TreeCache(caches[0], len(lengths)), {}, mask)
        scorer(tree, mask.sum(1).tolist())
        ours = list(seen)
        seen.clear()
        for step in range(4):
            mask = functional.pad(mask, (0, 1), value=1)
            positions = mask.sum(1, keepdim=True) - 1
            model(tokens[:, step : step + 1], attention_mask=mask, position_ids=positions, **as_cache(caches[1]))
        calls = iter(ours)
        for layer in range(2):
            for row in range(len(lengths)):
                for step in range(4):
                    keys, values, its_mask = seen[2 * step + layer]
                    our_keys, our_values, our_mask = next(calls)
                    torch.testing.assert_close(our_keys, keys[row : row + 1])
                    torch.testing.assert_close(our_values, values[row : row + 1])
                    assert (our_mask is None) == (its_mask is None), f"layer {layer}, step {step}"
                    assert our_mask is None or torch.equal(our_mask, its_mask[row : row + 1])

    def test_first_difference_notices_foreign_attention(self, tiny_model, monkeypatch):
        """All nodes at once, under a mask."""
        model = tiny_model(dtype=torch.bfloat16)
        assert not first_difference(model, product_sizes(model))

        bias = torch.full((8, 8), -1e9)
        for node, parent in enumerate((-1, 0, 1, 2, 0, 1, 5, 4)):
            if parent >= 0:
                bias[node] = bias[parent]
            bias[node, node] = 0

        def with_mask(self, stock, module, query, key, value, **kwargs):
            mask = functional.pad(bias.bfloat16(), (key.shape[2] - 8, 0))[None, None]
            return stock(module, query, key, value, mask, **kwargs)

        monkeypatch.setattr(per_node.PerNodeAttention, "attend", with_mask)
        assert first_difference(model, product_sizes(model)).startswith("layer")

    @pytest.mark.parametrize("change", CHANGES)
    def test_exact_trial_is_repeated_for_a_changed_model(self, tiny_model, monkeypatch, change):
        model = copy.deepcopy(tiny_model(dtype=torch.bfloat16, seed=13))
        cache = DynamicCache(config=model.config)
        first = exact_sizes(model, cache, 1, False)
        assert exact_sizes(model, cache, 1, False) is first, "what was tried is not tried again"
        monkeypatch.setattr("hf_speculate.forward.exact._tried", lambda *_: "tried again")
        CHANGES[change](model)
        assert exact_sizes(model, cache, 1, False) == "tried again" != first
