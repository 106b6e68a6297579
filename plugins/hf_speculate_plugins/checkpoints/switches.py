"""Keys of configs that change what a decoder layer computes, and that heads here cannot follow.

A head that was trained with one of them loads without it, drafts badly and never fails. So it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_speculate.errors import CheckpointError

from .config import ConfigValues


# Key -> the value that changes nothing. None: there is no such value.
NEUTRAL: Mapping[str, Any] = {
    # Which values RoPE turns, and how.
    "partial_rotary_factor": 1,
    "rotary_pct": 1,
    "rope_interleave": False,
    "rope_interleaved": False,
    "rope_is_neox_style": True,
    "no_rope_layers": None,
    "no_rope_layer_interval": None,
    "position_embedding_type": "rope",
    # Attention.
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "attn_temperature_tuning": False,
    "llama_4_scaling": None,
    "llama_4_scaling_beta": None,
    "clip_qkv": None,
    "use_swa": False,
    "attention_sink_bias": False,
    # Scales of states and logits.
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "scale_emb": 1,
    "scale_depth": None,
    "logits_scaling": 1,
    "logit_scale": 1,
    # Layers.
    "norm_eps": None,
    "layer_norm_eps": None,
    "layer_norm_epsilon": None,
    "hidden_activation": None,
    "use_parallel_residual": False,
    # EAGLE.
    "use_aux_hidden_state": True,
    "use_mtp_layernorm": False,
    "eh_proj_before_attn": False,
}


def refuse_switches(*places: ConfigValues) -> None:
    """Raises `CheckpointError` where a config, or its RoPE parameters, set a switch that no head here follows."""
    for place in places:
        rope = place.inner("rope_parameters")
        of_types = (rope.inner(kind) for kind in ("full_attention", "sliding_attention"))
        for values in (place, place.inner("rope_scaling"), rope, *of_types):
            for key, neutral in NEUTRAL.items():
                if key in values and values.values[key] != neutral:
                    raise CheckpointError(
                        f"{values.wrong(key, _wanted(neutral))} No head here computes that. If the head was trained "
                        "without it, remove the key."
                    )


def _wanted(neutral: Any) -> str:
    return "nothing" if neutral is None else repr(neutral)
