"""What configs and tensors say of the decoder layers of a head, and what is said of them in a config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_speculate.errors import CheckpointError

from .accounting import num_indexed
from .config import ConfigValues


Shapes = Mapping[str, tuple[int, ...]]

_ATTENTION = "layers.0.self_attn."
_LAYER = re.compile(r"^layers\.(\d+)\.")
_MAX_LAYERS = 64  # no published head has more than a handful; one is built before its tensors are asked for


def layer_config_of(config: ConfigValues) -> ConfigValues:
    """The config of the decoder layers: the top level, or speculators' nested one.

    The nested config may be a diff against the defaults of its class, so those are filled in.
    """
    if "transformer_layer_config" not in config:
        return config
    nested = config.inner("transformer_layer_config")
    model_type = nested.text("model_type") or "llama"
    try:
        defaults = CONFIG_MAPPING[model_type]().to_dict()
    except Exception as error:  # not known, or one that has no defaults
        raise nested.wrong("model_type", "that of a decoder that transformers knows") from error
    # Sizes must come from the file; a class's default window or layer types say nothing about it.
    kept = ("hidden_act", "rms_norm_eps", "max_position_embeddings")
    filled = {key: defaults[key] for key in kept if key in defaults}
    theta = (defaults.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None:
        filled["default_rope_theta"] = theta
    return ConfigValues(config.where, {**filled, **nested.values}, "transformer_layer_config.")


def num_layers_of(folder: str, shapes: Shapes) -> int:
    """By the names of tensors; a gap is a missing tensor, not a smaller head."""
    indices = [match[1] for name in shapes if (match := _LAYER.match(name))]
    return num_indexed(folder, "layer", indices, _MAX_LAYERS)


def attention_sizes(shapes: Shapes, layer_config: ConfigValues) -> dict[str, int]:
    """`hidden_size`, `num_heads`, `num_kv_heads`, `head_dim` by the tensors of the first layer.

    Raises:
        CheckpointError: sizes that no attention has.
        KeyError: a tensor is missing.
    """
    q_size, hidden_size = shapes[f"{_ATTENTION}q_proj.weight"][0], shapes[f"{_ATTENTION}o_proj.weight"][0]
    kv_size = shapes[f"{_ATTENTION}k_proj.weight"][0]
    q_norm = shapes.get(f"{_ATTENTION}q_norm.weight")
    # `head_dim` of configs is not always there and not always right: the tensors decide with the number of heads.
    head_dim = q_norm[0] if q_norm else q_size // layer_config.size("num_attention_heads")
    if not head_dim or q_size % head_dim or kv_size % head_dim:
        raise CheckpointError(
            f"q_proj has {q_size} rows and k_proj {kv_size}, which {layer_config.values.get('num_attention_heads')} "
            "heads (num_attention_heads in config.json) do not divide."
        )
    num_heads, num_kv_heads = q_size // head_dim, kv_size // head_dim
    if head_dim % 2 or num_heads % num_kv_heads:
        raise CheckpointError(
            f"{num_heads} heads of {head_dim} values, {num_kv_heads} of keys: RoPE turns pairs of values, and as many "
            "heads must share each head of keys."
        )
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def rope_of(layer_config: ConfigValues) -> dict[str, Any]:
    """RoPE parameters from either place: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    found = {**layer_config.inner("rope_scaling").values, **layer_config.inner("rope_parameters").values}
    if isinstance(found.get("full_attention"), dict):  # one set of parameters a layer type
        if "sliding_attention" in layer_config.texts("layer_types") and len({str(v) for v in found.values()}) > 1:
            raise layer_config.wrong("rope_parameters", "the same RoPE for all layers")
        found = dict(found["full_attention"])
    parameters = ConfigValues(layer_config.where, found, "rope_parameters.")
    rope_type = parameters.text("rope_type") or parameters.text("type") or "default"
    if rope_type == "mrope":  # three equal position ids for text: plain RoPE
        found, rope_type = {key: found[key] for key in ("rope_theta",) if key in found}, "default"
    theta = parameters.number("rope_theta", 0.0) or layer_config.number("rope_theta", 0.0)
    theta = theta or layer_config.number("default_rope_theta", 0.0)
    found = {key: value for key, value in found.items() if key != "type"}
    return {**found, "rope_type": rope_type, "rope_theta": float(theta or 10000.0)}


def windows_of(layer_config: ConfigValues, num_layers: int) -> tuple[int | None, ...]:
    """Length of the sliding window of every layer, None for full attention.

    Raises:
        CheckpointError: a layer of another kind.
    """
    types = layer_config.texts("layer_types")[:num_layers]
    if others := set(types) - {"full_attention", "sliding_attention"}:
        raise layer_config.wrong(
            "layer_types", f"full_attention and sliding_attention, not {', '.join(sorted(others))}"
        )
    if not layer_config.values.get("sliding_window") or not layer_config.flag("use_sliding_window", True):
        return (None,) * num_layers
    if not types and layer_config.flag("use_sliding_window", False):  # as Qwen's configs mean it
        first = layer_config.size("max_window_layers", 28)
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    window = layer_config.size("sliding_window", most=1 << 40)
    windows = [window if kind == "sliding_attention" else None for kind in types]
    return (*windows, *[None] * (num_layers - len(windows)))


def stated_sizes(spec: Any) -> dict[str, Any]:
    """What every config says of a head's layers, as transformers names it."""
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "num_hidden_layers": spec.num_layers,
        "head_dim": spec.head_dim,
        "hidden_act": spec.hidden_act,
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": False,
    }
