"""The layers of transformers' Llama, Qwen2 and Qwen3 that the native kernel computes."""

from __future__ import annotations

from typing import Any

from .layer_parts import LayerParts
from .modules import PackedMatrix


def parts_of(layer: Any) -> LayerParts | None:
    """The parts of a layer that the kernel needs; None where it computes something else."""
    attention, config = layer.self_attn, layer.self_attn.config
    if config.hidden_act != "silu" or getattr(attention, "sliding_window", None) is not None:
        return None
    parts = LayerParts.of(
        attention,
        layer.mlp,
        {"attention_norm": layer.input_layernorm, "mlp_norm": layer.post_attention_layernorm},
        sizes={
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": attention.head_dim,
            "inner": config.intermediate_size,
        },
        eps=layer.input_layernorm.variance_epsilon,
        scale=attention.scaling,
    )
    is_packed = any(isinstance(matrix, PackedMatrix) for matrix in parts.matrices)
    has_one_eps = all(norm.variance_epsilon == parts.eps for norm in parts.norms.values())
    return parts if is_packed and has_one_eps and parts.fit() else None
