"""The architectures of GGUF files that are loaded here, and how their models differ from Llama.

Names of keys: `gguf-py/gguf/constants.py` of llama.cpp. What its converter (`conversion/`) changes in weights is undone
in loading; what it leaves out of a file is as in its models (`src/models/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
)

from hf_speculate.errors import CheckpointError

from .metadata import Metadata


# Norms of a layer by their names in the file: those of Llama, and those around its parts as in Gemma.
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_AROUND = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

Sizes = Mapping[str, int]
"""Sizes of a model by the names of transformers' configurations."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of files (`general.architecture`).

    Attributes:
        name: its name, the prefix of its keys.
        config, model_class: config class, and name of the causal LM's class in transformers.
        norms: norms over the states of a layer, names in the file -> names in transformers.
        has_head_norms: whether the queries and keys of each head are normed.
        biased: projections that always have a bias; others may.
        permutes: whether the rows of q and k are in llama.cpp's order: pairs that rotate together are neighbours.
        norm_shift: number that is added to the weights of norms in the file.
        window_base: base of RoPE in layers with a window if the file names none; None: the model has one RoPE.
        is_hybrid: whether most layers are gated delta nets, and the others gate what each head gives and rotate only a
            part of a head, as in Qwen3.5.
        options: function that makes further options of the config from metadata and sizes.
    """

    name: str
    config: type[PreTrainedConfig]
    model_class: str
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)
    has_head_norms: bool = False
    biased: tuple[str, ...] = ()
    permutes: bool = False
    norm_shift: float = 0.0
    window_base: float | None = None
    is_hybrid: bool = False
    options: Callable[[Metadata, Sizes], dict[str, Any]] = lambda reader, sizes: {}


def _gemma3(reader: Metadata, sizes: Sizes) -> dict[str, Any]:
    """Options of Gemma 3. A file without the size of a window has none; a file without a cap of logits likewise."""
    key, cap = "gemma3.attention.sliding_window", "gemma3.final_logit_softcapping"
    window = reader.size(key) if reader.file.metadata.get(key) else None
    return {
        "query_pre_attn_scalar": _scaled_by(sizes, layers_of_27b=62),
        "final_logit_softcapping": reader.number(cap) if reader.file.metadata.get(cap) else None,
        **_windows(reader, "gemma3", sizes, window, every=6),
    }


def _gemma2(reader: Metadata, sizes: Sizes) -> dict[str, Any]:
    window = reader.size("gemma2.attention.sliding_window", 4096)
    return {
        "query_pre_attn_scalar": _scaled_by(sizes, layers_of_27b=46),
        "attn_logit_softcapping": reader.number("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": reader.number("gemma2.final_logit_softcapping", 30.0),
        **_windows(reader, "gemma2", sizes, window, every=2),
    }


def _scaled_by(sizes: Sizes, layers_of_27b: int) -> int:
    """The number by whose root Gemma divides scores. Files do not have it; the 27B model is recognised by its
    layers."""
    is_27b = sizes["num_hidden_layers"] == layers_of_27b
    return sizes["hidden_size"] // sizes["num_attention_heads"] if is_27b else sizes["head_dim"]


def _smollm3(reader: Metadata, sizes: Sizes) -> dict[str, Any]:
    """Every fourth layer has no RoPE; files do not state this."""
    return {"no_rope_layer_interval": 4}


def _granite(reader: Metadata, sizes: Sizes) -> dict[str, Any]:
    return {
        "attention_multiplier": reader.number("granite.attention.scale", sizes["head_dim"] ** -0.5),
        "embedding_multiplier": reader.number("granite.embedding_scale", 1.0),
        "residual_multiplier": reader.number("granite.residual_scale", 1.0),
        "logits_scaling": reader.number("granite.logit_scale"),
    }


def _qwen35(reader: Metadata, sizes: Sizes) -> dict[str, Any]:
    every, num_layers = reader.size("qwen35.full_attention_interval", 4), sizes["num_hidden_layers"]
    recurs = [(index + 1) % every != 0 for index in range(num_layers)]
    return {"layer_types": ["linear_attention" if recurrent else "full_attention" for recurrent in recurs]}


def _windows(reader: Metadata, architecture: str, sizes: Sizes, window: int | None, every: int) -> dict[str, Any]:
    """Options of the layers with a window.

    Args:
        window: number of entries that they see; None if no layer has a window.
        every: number of layers of which the last one sees the whole text, if the file has no number.
    """
    key, num_layers = f"{architecture}.attention.sliding_window_pattern", sizes["num_hidden_layers"]
    if isinstance(reader.file.metadata.get(key), list):
        slides = reader.items(key, bool)
        if len(slides) != num_layers:
            raise CheckpointError(f"{reader.file.path!r}: {key!r} has {len(slides)} entries for {num_layers} layers.")
    else:
        every = reader.size(key, every)
        slides = [(index + 1) % every != 0 for index in range(num_layers)]
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if window and slide else "full_attention" for slide in slides],
    }


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("llama", LlamaConfig, "LlamaForCausalLM", permutes=True),
        Architecture("qwen2", Qwen2Config, "Qwen2ForCausalLM", biased=("attn_q", "attn_k", "attn_v")),
        Architecture("qwen3", Qwen3Config, "Qwen3ForCausalLM", has_head_norms=True),
        Architecture(
            "gemma3",
            Gemma3TextConfig,
            "Gemma3ForCausalLM",
            norms=_AROUND,
            has_head_norms=True,
            norm_shift=1.0,
            window_base=10000.0,
            options=_gemma3,
        ),
        Architecture("gemma2", Gemma2Config, "Gemma2ForCausalLM", norms=_AROUND, norm_shift=1.0, options=_gemma2),
        Architecture("smollm3", SmolLM3Config, "SmolLM3ForCausalLM", permutes=True, options=_smollm3),
        Architecture(
            "qwen35",
            Qwen3_5TextConfig,
            "Qwen3_5ForCausalLM",
            norms={"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
            has_head_norms=True,
            norm_shift=1.0,
            is_hybrid=True,
            options=_qwen35,
        ),
        Architecture("granite", GraniteConfig, "GraniteForCausalLM", permutes=True, options=_granite),
    )
}


def find_architecture(reader: Metadata) -> Architecture:
    """The architecture of a file; raises `CheckpointError` if it is not known here."""
    name = reader.get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{reader.file.path!r} holds a model of architecture {name!r}; supported: {', '.join(ARCHITECTURES)}. "
            "(transformers' from_pretrained(gguf_file=) loads more, dequantised.)"
        )
    return ARCHITECTURES[name]
