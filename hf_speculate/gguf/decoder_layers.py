"""Which layers of transformers' Llama, Qwen2 and Qwen3 the native kernel computes."""

from __future__ import annotations

from typing import Any

from torch import nn

from .modules import PackedMatrix
from .native_layers import LayerParts


# Names of the norms of a layer and of its attention in the kernel; those of queries and keys are Qwen3's.
_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_HEAD_NORMS = {"q_norm": "q_norm", "k_norm": "k_norm"}


def parts_of(layer: Any) -> LayerParts | None:
    """What the kernel needs of a layer; None where it computes something else."""
    attention, mlp, config = layer.self_attn, layer.mlp, layer.self_attn.config
    norms = {name: getattr(layer, of) for of, name in _NORMS.items()}
    norms |= {name: getattr(attention, of) for of, name in _HEAD_NORMS.items() if hasattr(attention, of)}
    projections: dict[str, nn.Module] = {name: getattr(attention, f"{name}_proj") for name in "qkvo"}
    projections |= {name: getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")}
    eps = {norm.variance_epsilon for norm in norms.values()}
    is_known = config.hidden_act == "silu" and len(eps) == 1 and getattr(attention, "sliding_window", None) is None
    if not is_known:
        return None
    parts = LayerParts(
        sizes={
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": attention.head_dim,
            "inner": config.intermediate_size,
        },
        eps=eps.pop(),
        scale=attention.scaling,
        norms={name: norm.weight for name, norm in norms.items()},
        projections=projections,
    )
    is_packed = all(isinstance(matrix, PackedMatrix) for matrix in parts.matrices)
    return parts if is_packed and parts.fit() else None
