"""Tiny random models built on the spot, and parts of models that our scoring has to turn away."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .versions import skip_before


VOCAB_SIZE = 96
# Logits of a random model must differ clearly, or every step is a near tie: larger than the usual 0.02.
INITIALIZER_RANGE = 0.3
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
# Two KV heads of four; all but the number of layers.
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": INITIALIZER_RANGE,
    **SPECIAL_TOKENS,
}
CHAIN_ONLY = "rejects_4d_masks"


def random_model(model_class: Callable[[Any], PreTrainedModel], config: Any, seed: int = 0) -> PreTrainedModel:
    """Weights of `seed`, whatever was drawn before; the generator is left as it was. Padding is token 0."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config).eval().requires_grad_(False)
    torch.random.set_rng_state(state)
    model.generation_config.pad_token_id = 0
    return model


@cache
def build_tiny_model(
    architecture: str = "llama",
    tied: bool = False,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    vocab_size: int = VOCAB_SIZE,
    max_positions: int = 256,
    num_layers: int = 2,
    **config_kwargs,
):
    """A random model of `SIZES`. Cached: tests must not modify it."""
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
    }[architecture]
    options = {"vocab_size": vocab_size, "max_position_embeddings": max_positions, "num_hidden_layers": num_layers}
    if rope := config_kwargs.pop("rope", None):
        options["rope_parameters"] = dict(rope)
    config = config_class(**SIZES | options | config_kwargs, tie_word_embeddings=tied)
    config._attn_implementation = attention
    return random_model(model_class, config, seed).to(dtype)


@cache
def build_tiny_gpt2(attention: str = "sdpa", num_positions: int = 64, num_layers: int = 2, seed: int = 0):
    """A table of positions instead of RoPE, and token types. Cached: tests must not modify it."""
    sizes = {"n_positions": num_positions, "n_embd": 32, "n_layer": num_layers, "n_head": 4}
    config = GPT2Config(vocab_size=VOCAB_SIZE, **sizes, initializer_range=INITIALIZER_RANGE, **SPECIAL_TOKENS)
    config._attn_implementation = attention
    return random_model(GPT2LMHeadModel, config, seed)


@cache
def build_tiny_opt(num_positions: int = 64, seed: int = 0):
    """A table of positions that begins at 2. Cached: tests must not modify it."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": num_positions, "init_std": INITIALIZER_RANGE}
    return random_model(OPTForCausalLM, OPTConfig(vocab_size=VOCAB_SIZE, **sizes, **SPECIAL_TOKENS), seed)


def build_tiny_lfm2():
    """Short convolutions, whose states are recurrent, and attention."""
    skip_before("5.14", "recurrent layers take no drafts")
    kinds = ["conv", "full_attention"] * 2
    return random_model(Lfm2ForCausalLM, Lfm2Config(**SIZES, num_hidden_layers=4, layer_types=kinds))


def chain_only_attention(module, query, key, value, attention_mask, **kwargs):
    """Stands for flash attention: causal by itself, takes the 2-D padding mask, cannot take a tree's."""
    assert attention_mask is None or attention_mask.dim() == 2, f"a {attention_mask.dim()}-D mask reached the kernel"
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)[None, None]
    if attention_mask is not None:
        mask = mask & attention_mask[:, None, None, :].bool()
    # A padding query that sees nothing would be NaN; it may see itself.
    mask = mask | torch.eye(num_keys, dtype=torch.bool)[-num_queries:]
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def state_of(model: Any) -> tuple[Any, ...]:
    """Everything about a model, and the random numbers, that a request might leave changed."""
    hooks = [(list(m._forward_hooks.items()), list(m._forward_pre_hooks.items())) for m in model.modules()]
    ids = [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    weights = [(id(p), p.grad, p.requires_grad, p._version) for p in model.parameters()]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_rng_state().tolist()
    return hooks, ids, config, model.config._attn_implementation, generation, weights, modes


class Experts(nn.Module):
    """A bare matrix, whose product takes another way from 24 rows on."""

    def __init__(self, size):
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(size, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, states):
        return torch.matmul(states, self.matrix) * (1.0 if states.shape[1] < 24 else 1.01)
