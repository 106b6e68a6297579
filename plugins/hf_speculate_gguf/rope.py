"""RoPE in GGUF files: the metadata of its scaling, and the factors of Llama 3's.

Names of keys: `gguf-py/gguf/constants.py` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_speculate.errors import CheckpointError

from .architectures import Architecture
from .matrices import read_vector
from .metadata import Metadata
from .reading import GgufFile


ROPE_FACTORS = "rope_freqs.weight"

# Types of RoPE that `describe_rope` writes.
WRITTEN_ROPE = ("default", "linear", "llama3")

# Yarn's parameters: name in transformers -> name in the file.
_YARN = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}

# Keys of RoPE's scaling: those that are read or do not matter, and values of others that have no effect.
_SCALING = ("type", "factor", "original_context_length", "finetuned", *_YARN.values())
_NEUTRAL = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0, "alpha": 0.0}


def rope_parameters(reader: Metadata, architecture: Architecture, sizes: dict[str, int]) -> dict[str, Any]:
    """RoPE's parameters by transformers' names, by layer type if those with a window have their own."""
    parameters = _rope_parameters(reader, architecture.name, sizes)
    if architecture.is_hybrid:
        return parameters | _partial_rope(reader, architecture.name, sizes)
    if architecture.window_base is None:
        return parameters
    base = reader.number(f"{architecture.name}.rope.freq_base_swa", architecture.window_base)
    return {"full_attention": parameters, "sliding_attention": {"rope_type": "default", "rope_theta": base}}


def _rope_parameters(reader: Metadata, architecture: str, sizes: dict[str, int]) -> dict[str, Any]:
    """RoPE's parameters by transformers' names. As in llama.cpp, a factor without a type is linear."""
    prefix = f"{architecture}.rope"
    parameters = {"rope_type": "default", "rope_theta": reader.number(f"{prefix}.freq_base", 10000.0)}
    _check_scaling(reader, f"{prefix}.scaling.")
    kind = reader.get(f"{prefix}.scaling.type", str, "linear")
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(
            f"{reader.file.path!r}: RoPE scaling {kind!r} is not supported; supported: none, linear, yarn, and factors "
            f"in {ROPE_FACTORS!r}."
        )
    if kind == "none":
        return parameters
    old = reader.number(f"{prefix}.scale_linear", 1.0)  # the key of files before 2023-09
    factor = reader.number(f"{prefix}.scaling.factor", old if kind == "linear" else None)
    if kind == "linear" and factor == 1.0:
        return parameters
    parameters |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = reader.size(f"{prefix}.scaling.original_context_length", sizes["max_position_embeddings"])
        parameters["original_max_position_embeddings"] = original
        for ours, theirs in _YARN.items():
            if f"{prefix}.scaling.{theirs}" in reader.file.metadata:
                parameters[ours] = reader.number(f"{prefix}.scaling.{theirs}")
    return parameters


def _partial_rope(reader: Metadata, architecture: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Parameters of RoPE that rotates a part of each head, with positions of texts and pictures in sections of it."""
    rotated = reader.size(f"{architecture}.rope.dimension_count")
    sections = reader.items(f"{architecture}.rope.dimension_sections", int) or [rotated // 2, 0, 0]
    if rotated % 2 or rotated > sizes["head_dim"] or len(sections) < 3 or min(sections) < 0:
        raise CheckpointError(
            f"{reader.file.path!r}: RoPE turns {rotated} of the {sizes['head_dim']} values of a head, in sections "
            f"{sections}: pairs within a head, and three sections, are expected."
        )
    return {
        "partial_rotary_factor": rotated / sizes["head_dim"],
        "mrope_section": sections[:3],
        "mrope_interleaved": True,
    }


def _check_scaling(reader: Metadata, prefix: str) -> None:
    """Raises `CheckpointError` for an unknown key of scaling, unless its value has no effect."""
    for key in reader.file.metadata:
        name = key.removeprefix(prefix)
        if name == key or name in _SCALING:
            continue
        if name not in _NEUTRAL or reader.get(key, float) != _NEUTRAL[name]:
            raise CheckpointError(f"{reader.file.path!r}: RoPE with {key!r} of its own is not supported.")


def rope_factors(file: GgufFile, head_dim: int) -> Tensor | None:
    entry = file.tensors.get(ROPE_FACTORS)
    if entry is None:
        return None
    factors = read_vector(file, entry).float()
    if not (factors.isfinite().all() and factors.min() > 0):
        raise CheckpointError(f"{file.path!r}: {ROPE_FACTORS!r} holds factors that are not positive numbers.")
    return factors


def name_factors(config: Any, factors: Tensor) -> None:
    """Names Llama 3's scaling in `config` if its usual parameters give the file's factors.

    The model uses the factors themselves, with or without the name.
    """
    plain = config.rope_parameters
    if plain["rope_type"] != "default" or torch.equal(factors, torch.ones_like(factors)):
        return
    config.rope_parameters = plain | {
        "rope_type": "llama3",
        "factor": factors.max().item(),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if not torch.allclose(scaled, plain_frequencies(config) / factors, rtol=1e-4, atol=0):
        config.rope_parameters = plain


def check_angles(reader: Metadata, config: Any) -> None:
    """Raises `CheckpointError` if RoPE's parameters, each valid alone, do not give frequencies together."""
    parameters = config.rope_parameters
    of_types = {None: parameters} if "rope_type" in parameters else parameters
    for layer_type, rope in of_types.items():
        kind, named = rope["rope_type"], {} if layer_type is None else {"layer_type": layer_type}
        try:
            plain = kind == "default"
            frequencies = (
                _frequencies(rope["rope_theta"], rotated_size(config, rope))
                if plain
                else ROPE_INIT_FUNCTIONS[kind](config, "cpu", **named)[0]
            )
        except (ArithmeticError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{reader.file.path!r}: RoPE cannot be computed: {error}") from error
        if not (frequencies.isfinite().all() and frequencies.shape == (rotated_size(config, rope) // 2,)):
            raise CheckpointError(f"{reader.file.path!r}: RoPE with {rope} gives no angles.")


def read_rope(file: GgufFile, architecture: str, head_dim: int, context_length: int) -> dict[str, Any]:
    """`rope_parameters` of transformers for a file of any architecture, its factors among them.

    Raises:
        CheckpointError: a scaling that is not supported, or factors that are not Llama 3's.
    """
    sizes = {"head_dim": head_dim, "max_position_embeddings": context_length}
    parameters, factors = _rope_parameters(Metadata(file), architecture, sizes), rope_factors(file, head_dim)
    if factors is None or torch.equal(factors, torch.ones_like(factors)):
        return parameters
    config: Any = LlamaConfig(head_dim=head_dim, max_position_embeddings=context_length, rope_parameters=parameters)
    name_factors(config, factors)
    if config.rope_parameters["rope_type"] == parameters["rope_type"]:
        raise CheckpointError(
            f"{file.path!r}: the factors in {ROPE_FACTORS!r} are not those of Llama 3's scaling with its usual "
            "parameters (low_freq_factor 1, high_freq_factor 4, 8192 tokens), the only one that is read here."
        )
    return config.rope_parameters


def describe_rope(architecture: str, rope: Mapping[str, Any], head_dim: int) -> tuple[dict[str, Any], Tensor | None]:
    """The metadata of RoPE for an architecture, and the divisors of its frequencies; the opposite of `read_rope`.

    Raises:
        CheckpointError: a scaling that is not written, see `WRITTEN_ROPE`.
    """
    kind, metadata = rope["rope_type"], {f"{architecture}.rope.freq_base": float(rope["rope_theta"])}
    if kind not in WRITTEN_ROPE:
        raise CheckpointError(
            f"RoPE scaling {kind!r} is not written to GGUF files; possible: {', '.join(WRITTEN_ROPE)}."
        )
    if kind == "linear":
        scaling = {
            f"{architecture}.rope.scaling.type": kind,
            f"{architecture}.rope.scaling.factor": float(rope["factor"]),
        }
        return metadata | scaling, None
    if kind == "default":
        return metadata, None
    config = LlamaConfig(head_dim=head_dim, rope_parameters=dict(rope))
    return metadata, plain_frequencies(config) / ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]


def rotated_size(config: Any, parameters: Mapping[str, Any]) -> int:
    """The number of values of a head that RoPE rotates."""
    return round(config.head_dim * parameters.get("partial_rotary_factor", 1.0))


def plain_frequencies(config: Any) -> Tensor:
    """float32 [head_dim / 2]: RoPE's frequencies without any scaling."""
    return _frequencies(config.rope_parameters["rope_theta"], config.head_dim)


def _frequencies(base: float, head_dim: int) -> Tensor:
    return 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
