"""Configs of decoder layers: their place, the defaults of the class that reads them, RoPE and windows."""

from __future__ import annotations

from typing import Any

from packaging.version import InvalidVersion, Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_speculate.errors import CheckpointError

from .config import ConfigValues


# Keys whose defaults a class of transformers decides. Sizes come from the tensors, apart from the number of heads.
_OF_CLASS = ("hidden_act", "rms_norm_eps", "max_position_embeddings")
_OF_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers")
_NESTED = "transformer_layer_config"
# Class of a nested config without `model_type`, by the first version of speculators that has it (all: 0.1 to 0.9).
# vLLM takes the oldest one for configs that name no version.
_NESTED_TYPES = {
    **dict.fromkeys(("eagle", "eagle3", "peagle"), (("0", "llama"), ("0.7.0", "qwen3"))),
    **dict.fromkeys(("dflash", "dspark", "dflash2", "xpress"), (("0", "qwen3"),)),
}


def layer_config(config: ConfigValues, flat_type: str) -> ConfigValues:
    """The config of the decoder layers, with the defaults of its class: speculators' nested one, or the top level.

    Raises:
        CheckpointError: an unknown class, or windows that the config does not switch on.
    """
    if _NESTED not in config:
        place, model_type, kept = config, flat_type, (*_OF_CLASS, *_OF_WINDOWS)
    else:
        place, kept = config.inner(_NESTED), (*_OF_CLASS, *_OF_WINDOWS, "num_attention_heads")
        model_type = place.text("model_type") or _nested_type(config)
    defaults = class_defaults(place, model_type)
    _check_windows(place, defaults)
    filled = {key: defaults[key] for key in kept if key in defaults}
    theta = (defaults.get("rope_parameters") or {}).get("rope_theta")
    return place.with_defaults({**filled, "model_type": model_type, "default_rope_theta": theta})


def nested_layers(config: ConfigValues) -> tuple[ConfigValues, ...]:
    """The nested config of the decoder layers as it is written, if there is one."""
    return (config.inner(_NESTED),) if _NESTED in config else ()


def class_defaults(place: ConfigValues, model_type: str) -> dict[str, Any]:
    """The values that the class of a model type gives absent keys; `CheckpointError` if there is no such class."""
    try:
        config_class = CONFIG_MAPPING[model_type]
        defaults = config_class().to_dict()
    except Exception as error:  # not known, or one that has no defaults
        raise place.wrong("model_type", "that of a decoder that transformers knows") from error
    if "use_sliding_window" in defaults:  # an instance without windows has dropped their length
        defaults["sliding_window"] = getattr(config_class, "sliding_window", None)
    return defaults


def speculators_version(config: ConfigValues) -> Version | None:
    """Version of speculators that wrote a config; None if another program wrote it, or the key holds no version."""
    try:
        return Version(config.text("speculators_version") or "")
    except InvalidVersion:
        return None


def _nested_type(config: ConfigValues) -> str:
    kind, version = config.text("speculators_model_type", "eagle3"), speculators_version(config) or Version("0")
    types = _NESTED_TYPES.get(kind or "", (("0", "llama"),))
    return next(model_type for first, model_type in reversed(types) if version >= Version(first))


def _check_windows(place: ConfigValues, defaults: dict[str, Any]) -> None:
    """Raises `CheckpointError` for windows without the switch of their class, which would ignore them."""
    is_off = defaults.get("use_sliding_window") is False and "use_sliding_window" not in place
    if is_off and "sliding_window" in place and "sliding_attention" in place.texts("layer_types"):
        raise CheckpointError(
            f"{place.where}: {place.file} names sliding layers and their window, but not use_sliding_window, which is "
            'false by default. Add "use_sliding_window": true if the head was trained with the window, else false.'
        )


def rope_of(layer_config: ConfigValues) -> dict[str, Any]:
    """RoPE parameters from either place: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    rope = {**layer_config.inner("rope_scaling").values, **layer_config.inner("rope_parameters").values}
    if isinstance(rope.get("full_attention"), dict):  # one set of parameters per layer type
        if "sliding_attention" in layer_config.texts("layer_types") and len({str(v) for v in rope.values()}) > 1:
            raise layer_config.wrong("rope_parameters", "the same RoPE for all layers")
        rope = dict(rope["full_attention"])
    parameters = ConfigValues(layer_config.where, rope, "rope_parameters.")
    rope_type = parameters.text("rope_type") or parameters.text("type") or "default"
    if rope_type == "mrope":  # three equal position ids for text: plain RoPE
        rope, rope_type = {key: rope[key] for key in ("rope_theta",) if key in rope}, "default"
    theta = parameters.number("rope_theta", 0.0) or layer_config.number("rope_theta", 0.0)
    theta = theta or layer_config.number("default_rope_theta", 0.0)
    rope = {key: value for key, value in rope.items() if key != "type"}
    return {**rope, "rope_type": rope_type, "rope_theta": float(theta or 10000.0)}


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
