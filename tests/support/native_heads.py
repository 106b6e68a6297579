"""EAGLE heads of sizes that the native kernel computes, random weights."""

from __future__ import annotations

import dataclasses

import torch

from hf_speculate_plugins.eagle import EagleHead, EagleSpec


SPEC = EagleSpec(
    dialect="specforge",
    version=3,
    hidden_size=64,
    target_hidden_size=64,
    vocab_size=96,
    draft_vocab_size=96,
    num_layers=1,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
SPECS = {
    "EAGLE-3": {},
    "normed residual, plain embedding": {"norm_before_residual": True, "norm_embedding": False},
    "Qwen3": {"qk_norm": True, "head_dim": 32},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "two layers": {"num_layers": 2, "windows": (None, None)},
    "llama3 RoPE": {
        "rope": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "EAGLE-1": {"version": 1, "num_features": 1, "norm_logits": False},
    "EAGLE-1, two layers": {"version": 1, "num_features": 1, "num_layers": 2, "windows": (None, None)},
}


def make_head(dtype=torch.float32, **changes) -> EagleHead:
    torch.manual_seed(0)
    head = EagleHead(dataclasses.replace(SPEC, **changes)).requires_grad_(False)
    for name, weight in head.named_parameters():
        weight.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.2)
    rotary = head.rotary
    head = head.to(dtype)
    head.rotary = rotary.float()
    return head
