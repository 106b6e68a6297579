"""Tiny models built on the spot: no network, no files, one thread, deterministic."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.cache_utils import DynamicLayer

from hf_speculate.tree import DraftTree


REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"

VOCAB_SIZE = 96


# Tests are about trees: what is drafted must not depend on the clock. Those about the tuner ask for it.
os.environ["HF_SPECULATE_ADAPTIVE"] = "0"


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@cache
def build_tiny_model(
    architecture: str = "llama",
    tied: bool = False,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    max_positions: int = 256,
    **config_kwargs,
):
    """A random model: 2 layers, 4 heads over 2 KV heads. Cached: tests must not modify it."""
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[architecture]
    rope = config_kwargs.pop("rope", None)
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        # Larger than the usual 0.02: logits of a random model must differ clearly, or every step is a near tie.
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        **({"rope_parameters": dict(rope)} if rope else {}),
        **config_kwargs,
    )
    config._attn_implementation = attention
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config).eval().to(dtype)
    torch.random.set_rng_state(state)
    model.generation_config.pad_token_id = 0
    model.requires_grad_(False)
    return model


@pytest.fixture
def tiny_model():
    """Factory of tiny models, see `build_tiny_model`."""
    return build_tiny_model


def random_prompt(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """int64 [1, length] without special tokens; half of it repeats, so that prompt lookup finds something."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    half = torch.randint(3, vocab_size, ((length + 1) // 2,), generator=generator)
    return torch.cat([half, half])[None, :length]


@pytest.fixture
def prompt():
    """Factory of prompts, see `random_prompt`."""
    return random_prompt


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


@pytest.fixture
def shared_root() -> Path:
    """The data beside the checkout; tests that want it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared beside this checkout")
    return SHARED


@pytest.fixture
def golden_root(shared_root) -> Path:
    return shared_root / "golden"


@pytest.fixture
def real_llama(shared_root):
    """stories260k, a real Llama of 260 000 parameters, fp32."""
    return AutoModelForCausalLM.from_pretrained(shared_root / "models" / "stories260k").eval()


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled, and nothing counted: functions of earlier tests would be found again."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
