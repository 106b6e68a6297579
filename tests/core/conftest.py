"""Random draft trees for the tests of the core; models in folders for those of benchmarks."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import DynamicLayer

from hf_speculate.tree import DraftTree

from ..inputs import character_tokenizer


def random_tree(seed: int, batch_size: int, vocab_size: int, max_nodes: int = 12, roots=None) -> DraftTree:
    """Rows of random structure and width; siblings differ."""
    choose, rows = random.Random(seed), []
    for row in range(batch_size):
        root = choose.randrange(vocab_size) if roots is None else roots[row]
        tokens, parents, taken = [root], [-1], set()
        for _ in range(choose.randint(0, max_nodes)):
            parent, token = (
                choose.choice([len(tokens) - 1, choose.randrange(len(tokens))]),
                choose.randrange(vocab_size),
            )
            if (parent, token) not in taken:
                taken.add((parent, token))
                tokens.append(token)
                parents.append(parent)
        rows.append((tokens, parents))
    return DraftTree.from_rows(rows)


@pytest.fixture(name="random_tree")
def _random_tree():
    """Factory of trees, see `random_tree`."""
    return random_tree


class StrangeLayer(DynamicLayer):
    """A layer of somebody else: what it does with its entries is not known."""


@pytest.fixture
def strange_cache():
    """Factory of caches with layers that cannot be indexed, for a model."""

    def make(model):
        cache = DynamicCache(config=model.config)
        cache.layers = [StrangeLayer() for _ in cache.layers]
        return cache

    return make


@pytest.fixture(scope="session")
def bench_folders(tmp_path_factory):
    """`target` and `draft` of the same vocabulary, as users have them."""
    root, tokenizer = tmp_path_factory.mktemp("models"), character_tokenizer(pad_token="<pad>", bos_token="<s>")
    for name, seed in (("target", 0), ("draft", 1)):
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=2,
        )
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root
