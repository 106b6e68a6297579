"""One forward over a tree: every node's logits are those of a plain forward over the node's own text."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_speculate import DraftTree, Speculator
from hf_speculate.forward import Nodes
from hf_speculate.target.positions import DepthLimit, has_length_dependent_rope
from hf_speculate.testing import RandomDrafter

from ..support.models import VOCAB_SIZE, build_tiny_gpt2
from ..support.requests import prefilled


# eager's soft-max is fp32 whatever the model's dtype.
TOLERANCE = {"sdpa": 1e-10, "eager": 5e-5}


def mask_of(scorer, tree):
    return scorer.mask(scorer.metadata(Nodes(tree, [0] * tree.batch_size, 0, {})))


def path_to(tree, row, node):
    """Tokens from the root to a node."""
    tokens, parents = tree.host.token_ids[row], tree.host.parents[row]
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def from_scratch(model, texts, tree, row, node):
    return model(torch.tensor([texts[row] + path_to(tree, row, node)])).logits[0, -1]


def assert_nodes_right(model, texts, tree, logits, first=0, tolerance=1e-10):
    for row in range(tree.batch_size):
        for node in range(first, tree.num_nodes):
            if tree.host.parents[row][node] != -2:
                expected = from_scratch(model, texts, tree, row, node)
                error = (logits[row, node - first] - expected).abs().max().item()
                assert error <= tolerance, f"row {row}, node {node}: off by {error:.1e}"


def dtype_for(attention, is_padded):
    """fp64 where stock can: its own prefill of a padded batch is NaN with eager attention in fp64."""
    return torch.float32 if attention == "eager" and is_padded else torch.float64


def texts_of(prompt, *lengths):
    return [prompt(length, seed=index)[0].tolist() for index, length in enumerate(lengths)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
class TestTreeForward:
    @pytest.mark.parametrize("lengths", [(9,), (1,), (7, 7), (9, 4, 1)], ids=["one", "one token", "batch", "padded"])
    def test_tree_forward_scores_every_node_as_its_text_alone(
        self, tiny_model, prompt, random_tree, architecture, attention, lengths
    ):
        model = tiny_model(architecture, attention=attention, dtype=dtype_for(attention, len(set(lengths)) > 1))
        texts = texts_of(prompt, *lengths)
        for seed in range(2):
            scorer, positions = prefilled(model, texts)
            tree = random_tree(seed, len(texts), VOCAB_SIZE)
            output = scorer(tree, positions)
            assert output.logits.shape == (len(texts), tree.num_nodes, VOCAB_SIZE)
            assert_nodes_right(model, texts, tree, output.logits, tolerance=TOLERANCE[attention])

    def test_tree_forward_is_right_for_rows_of_different_pace(
        self, tiny_model, prompt, random_tree, architecture, attention
    ):
        model = tiny_model(architecture, attention=attention, dtype=dtype_for(attention, True))
        texts = texts_of(prompt, 5, 8)
        scorer, _ = prefilled(model, texts)
        for seed, nodes in enumerate(([2, 4], [3, 0], [0, 3])):
            tree = random_tree(seed + 4, 2, VOCAB_SIZE, max_nodes=16)
            output = scorer(tree, list(map(len, texts)))
            assert_nodes_right(model, texts, tree, output.logits, tolerance=TOLERANCE[attention])
            paths = [tree.plan.ancestors[row, node].nonzero().flatten().tolist() for row, node in enumerate(nodes)]
            scorer.cache.keep(paths)
            for row, node in enumerate(nodes):
                texts[row] += path_to(tree, row, node)
        assert scorer.cache.is_ragged

    def test_tree_forward_by_levels_equals_one_forward(self, tiny_model, prompt, architecture, attention):
        model = tiny_model(architecture, attention=attention, dtype=dtype_for(attention, True))
        texts = texts_of(prompt, 9, 4)
        tokens = torch.arange(14).view(2, 7) + 3
        parents = (-1, 0, 0, 1, 1, 2, 3)
        tree = DraftTree(tokens, parents)
        scorer, positions = prefilled(model, texts)
        at_once = scorer(tree, positions).logits
        scorer.cache.restore()
        levels = []
        for start, end in ((0, 1), (1, 3), (3, 6), (6, 7)):
            part = DraftTree(tokens[:, :end], parents[:end])
            levels.append(scorer(part, positions, num_cached=start).logits)
        assert torch.allclose(torch.cat(levels, dim=1), at_once, rtol=0, atol=TOLERANCE[attention])
        assert_nodes_right(model, texts, tree, at_once, tolerance=TOLERANCE[attention])


class TestMaskForms:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_a_tree_mask_is_additive_and_of_the_models_dtype(self, tiny_model, prompt, random_tree, attention, dtype):
        model = tiny_model(attention=attention, dtype=dtype)
        scorer, _ = prefilled(model, texts_of(prompt, 5))
        mask = mask_of(scorer, random_tree(1, 1, VOCAB_SIZE))
        assert mask.dtype == dtype
        assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}

    def test_tree_mask_has_the_dtype_of_the_keys_under_autocast(self, prompt, random_tree):
        with torch.autocast("cpu", torch.bfloat16):
            scorer, _ = prefilled(build_tiny_gpt2(), texts_of(prompt, 5))
        assert mask_of(scorer, random_tree(1, 1, VOCAB_SIZE)).dtype == torch.bfloat16

    def test_root_after_a_prefix_without_holes_needs_no_mask(self, tiny_model, prompt):
        scorer, _ = prefilled(tiny_model(), texts_of(prompt, 5))
        assert mask_of(scorer, DraftTree.root_only(torch.tensor([3]))) is None

    def test_tree_mask_hides_holes_and_padding(self, tiny_model, prompt):
        scorer, positions = prefilled(tiny_model(), texts_of(prompt, 3, 5))
        tree = DraftTree.chain(torch.tensor([[3, 4, 5], [6, 7, 8]]))
        scorer(tree, positions)
        scorer.cache.keep([[0], [0, 1, 2]])
        mask = mask_of(scorer, DraftTree.root_only(torch.tensor([3, 4])))
        visible = (mask[:, 0, 0] == 0).long().tolist()
        assert visible == [[0, 0, 1, 1, 1, 1, 0, 0, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1]]

    def test_chains_use_the_causal_mask_of_the_model(self, tiny_model, prompt):
        chain = DraftTree.chain(torch.tensor([[3, 4, 5], [6, 7, 8]]))
        scorer, _ = prefilled(tiny_model(), texts_of(prompt, 5, 5), shape="chain")
        assert mask_of(scorer, chain) is None
        scorer, _ = prefilled(tiny_model(), texts_of(prompt, 3, 5), shape="chain")
        assert mask_of(scorer, chain).tolist() == [[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8]


class TestChainOnlyAttention:
    @pytest.mark.parametrize("lengths", [(6,), (6, 3)], ids=["one", "padded"])
    def test_chain_only_attention_scores_chains(self, tiny_model, prompt, chain_only, lengths):
        model, plain = (tiny_model(attention=name, dtype=torch.float64) for name in (chain_only, "sdpa"))
        texts = texts_of(prompt, *lengths)
        scorer, positions = prefilled(model, texts, shape="chain")
        tree = DraftTree.chain(torch.arange(4 * len(texts)).view(len(texts), 4) + 3)
        assert_nodes_right(plain, texts, tree, scorer(tree, positions).logits)

    @pytest.mark.parametrize("lengths", [(6,), (6, 3)], ids=["one", "padded"])
    def test_chain_only_attention_cuts_trees_to_chains_and_counts_the_fallback(
        self, tiny_model, prompt, chain_only, lengths
    ):
        model = tiny_model(attention=chain_only)
        width = max(lengths)
        texts = texts_of(prompt, *lengths)
        ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
        inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "max_new_tokens": 20}
        speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE))
        output = model.generate(**inputs, speculator=speculator, return_dict_in_generate=True)
        assert torch.equal(output.sequences, model.generate(**inputs))
        assert any("chains only" in reason for reason in output.speculation.fallbacks)


def rope_config(tiny_model, **parameters):
    config = copy.deepcopy(tiny_model().config)
    config.max_position_embeddings = 32
    config.rope_parameters = parameters
    return config


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


class TestRopeLimit:
    @pytest.mark.parametrize(
        ("parameters", "root_position", "limit"),
        [
            ({"rope_type": "default"}, 100, None),
            ({"rope_type": "yarn", "factor": 2.0}, 100, None),
            # dynamic: the last position of the trained context is 31; behind it every length has its own RoPE.
            (DYNAMIC, 0, 31),
            (DYNAMIC, 30, 1),
            (DYNAMIC, 31, 0),
            (DYNAMIC, 50, 0),
            # longrope: one switch, behind position 15.
            (LONGROPE, 0, 15),
            (LONGROPE, 14, 1),
            (LONGROPE, 15, 0),
            (LONGROPE, 16, None),
            ({"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default"}}, 20, 11),
            ({"full_attention": DYNAMIC, "sliding_attention": LONGROPE}, 10, 5),
        ],
    )
    def test_tree_depth_ends_where_rope_changes(self, tiny_model, parameters, root_position, limit):
        config = rope_config(tiny_model, **parameters)
        assert DepthLimit(config)([root_position]) == limit
        nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
        expected = any(part["rope_type"] in ("dynamic", "longrope") for part in nested)
        assert has_length_dependent_rope(config) is expected
