"""Typed access to configs, and the keys that change what a decoder layer computes and that no head here follows.

A value of another type, or beyond what anything can have, is a `CheckpointError`. So is a key that no head here
follows: a head that was trained with one loads without it, drafts badly and never fails.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from hf_speculate.errors import CheckpointError


# Far more than anything has, and little enough to be multiplied and made tensors of.
MAX_SIZE = 1 << 26
# speculators' name of the mask token, and those of vLLM.
_MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token", "dspark_noise_token_id")

# Key of a flat config that stands for the metadata of a GGUF file, and the name of such a file.
GGUF_ARCHITECTURE, GGUF_FILE = "gguf_architecture", "draft.gguf"
# `WRITTEN_ROPE` of GGUF files, whose package is slow to import.
GGUF_ROPE = ("default", "linear", "llama3")


class ConfigValues:
    """The values of one object of a config. Null is as good as absent."""

    def __init__(self, where: str, values: Mapping[str, Any], prefix: str = ""):
        self.where = where
        self.values = values
        self._prefix = prefix

    @property
    def file(self) -> str:
        """The place of the values, for messages."""
        return "the metadata" if self.where.endswith(".gguf") else "config.json"

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigValues:
        """The same object, with these values for its absent keys."""
        stated = {key: value for key, value in self.values.items() if value is not None}
        return ConfigValues(self.where, {**defaults, **stated}, self._prefix)

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        """The error for a value that is not what it should be."""
        shown = repr(self.values.get(key))
        shown = shown if len(shown) <= 80 else f"{shown[:60]} ..."
        return CheckpointError(f"{self.where}: {self._prefix}{key} in {self.file} is {shown}, expected {wanted}.")

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A positive integer; without a default it must be there."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.where}: {self.file} lacks {self._prefix}{key}.")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.wrong(key, f"an integer from 1 to {most}")
        return value

    def token(self, key: str) -> int | None:
        """A token id; None if the config has none."""
        value = self.values.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise self.wrong(key, "a token id")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number that is not negative."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, "a number")
        if not 0 <= value < 1e30 or not math.isfinite(value):
            raise self.wrong(key, "a finite number that is not negative")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if value not in (True, False) or isinstance(value, float):
            raise self.wrong(key, "true or false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return default if value is None else value

    def inner(self, key: str) -> ConfigValues:
        """An object; an empty one where there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return ConfigValues(self.where, value or {}, f"{self._prefix}{key}.")

    def texts(self, key: str) -> list[str]:
        values = self._list(key, "a list of strings")
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(key, "a list of strings")
        return values

    def indices(self, key: str) -> list[int]:
        """Integers, which may be negative."""
        values = self._list(key, "a list of integers")
        if not all(type(value) is int and abs(value) <= MAX_SIZE for value in values):
            raise self.wrong(key, "a list of integers")
        return values

    def _list(self, key: str, wanted: str) -> list[Any]:
        value = self.values.get(key)
        if value is not None and not isinstance(value, list | tuple):
            raise self.wrong(key, wanted)
        return list(value or [])


def mask_token_of(*places: ConfigValues) -> int | None:
    """The token whose embedding stands for tokens not known yet, under any of its names; None if it is not given."""
    tokens = (place.token(key) for place in places for key in _MASK_TOKENS)
    return next((token for token in tokens if token is not None), None)


# Key -> the value that changes nothing. None: there is no such value.
NEUTRAL: Mapping[str, Any] = {
    # RoPE: the values that it turns, and its order.
    "partial_rotary_factor": 1,
    "rotary_pct": 1,
    "rope_interleave": False,
    "rope_interleaved": False,
    "rope_is_neox_style": True,
    "is_neox_style": True,
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
    "attention_value_scale": 1,
    "use_swa": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
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


def refuse_switches(*places: ConfigValues, follows: Collection[str] = ()) -> None:
    """Raises `CheckpointError` where a config, or its RoPE parameters, set a switch that such heads do not follow.

    Args:
        follows: switches that they do follow, but not inside RoPE parameters.
    """
    for place in places:
        rope = place.inner("rope_parameters")
        of_types = (rope.inner(kind) for kind in ("full_attention", "sliding_attention"))
        for values in (place, place.inner("rope_scaling"), rope, *of_types):
            for key, neutral in NEUTRAL.items():
                if key in values and values.values[key] != neutral and not (values is place and key in follows):
                    raise CheckpointError(
                        f"{values.wrong(key, _wanted(neutral))} No head of this kind computes that here. If it was "
                        "trained without it, remove the key."
                    )


def _wanted(neutral: Any) -> str:
    return "nothing" if neutral is None else repr(neutral)
