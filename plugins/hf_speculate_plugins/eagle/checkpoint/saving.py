"""Writing a head in a published layout, so that the projects of that layout load it.

A layout that cannot say what a head computes is refused: a file that others read differently would draft badly and
never fail. Tensors keep the dtype that they have, those of the target too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hf_speculate.errors import CheckpointError
from hf_speculate.target import embedding_rows, output_rows

from ...checkpoints import speculators_section, stated_sizes, vocabulary_tensors, write_checkpoint
from ..head import EagleHead
from ..spec import EagleSpec


LayoutName = Literal["safeailab", "specforge", "speculators", "compact"]

# Who reads a layout -> the layout.
_READERS = {"vllm": "speculators", "sglang": "specforge"}

# "compact" is SpecForge's without what the target has anyway: nobody else reads it; `convert` makes the others of it.
_AS_SPECFORGE = ("specforge", "compact")

# What a layout's readers can not be told, as (name for people, does the spec need it).
_Limit = tuple[str, Callable[[EagleSpec], bool]]
_NEEDS_SPECULATORS: tuple[_Limit, ...] = (
    ("more than one layer", lambda spec: spec.num_layers > 1),
    ("norms of queries and keys", lambda spec: spec.qk_norm),
    ("norm_before_fc", lambda spec: spec.norm_before_fc),
    ("norm_before_residual", lambda spec: spec.norm_before_residual),
    ("a normed state fed back", lambda spec: spec.feed_back_normed),
    ("sliding windows", lambda spec: any(spec.windows)),
    ("other than three features", lambda spec: spec.version == 3 and spec.num_features != 3),
    ("the mask of P-EAGLE", lambda spec: spec.parallel),
)
_COMMON: tuple[_Limit, ...] = (
    ("a first layer without a norm on the embedding", lambda spec: not spec.norm_embedding),
    ("biases of output projections", lambda spec: spec.o_bias or spec.mlp_bias),
    ("biases in EAGLE-3", lambda spec: spec.version == 3 and (spec.fc_bias or spec.qkv_bias)),
)
_SPECFORGE: tuple[_Limit, ...] = (*_COMMON, *_NEEDS_SPECULATORS, ("EAGLE-1", lambda spec: spec.version == 1))
_LIMITS: dict[str, tuple[_Limit, ...]] = {
    "safeailab": (
        *_COMMON,
        *_NEEDS_SPECULATORS,
        ("a norm of every feature", lambda spec: spec.fc_norm),
        ("logits without a norm", lambda spec: spec.version == 3 and not spec.norm_logits),
        ("a head size other than hidden size / heads", lambda s: s.head_dim * s.num_heads != s.hidden_size),
        ("RoPE scaling", lambda spec: spec.rope["rope_type"] != "default"),
    ),
    "specforge": _SPECFORGE,
    "compact": (*_SPECFORGE, ("an output matrix of its own", lambda spec: spec.own_output)),
    "speculators": (
        *_COMMON,
        ("EAGLE-1", lambda spec: spec.version == 1),
        ("logits without a norm", lambda spec: not spec.norm_logits),
        ("windows of different lengths", lambda spec: len({w for w in spec.windows if w}) > 1),
        ("a mask token that nobody has named", lambda spec: spec.parallel and spec.mask_token_id is None),
    ),
}


def write_head(
    path: str | os.PathLike,
    head: EagleHead,
    target_ids: Tensor | None,
    layout: LayoutName | str,
    *,
    num_target_layers: int | None,
    target_name: str | None = None,
    target_architectures: list[str] | None = None,
    embeddings_were_trained: bool | None = None,
) -> None:
    """Writes weights and config.json to the folder `path`, which is made.

    Args:
        num_target_layers: depth of the target; None if unknown: a head that reads the default layers can do without.
        target_name, target_architectures: for layouts whose config names the target.
        embeddings_were_trained: whether the head's own embeddings are better than the target's; None: if it has any.
    Raises:
        CheckpointError: the layout cannot express this head; the message says why.
    """
    spec = head.spec
    layout = check_layout(layout, spec)
    layers = _feature_layers(spec, layout, num_target_layers)
    tensors = _tensors(head, target_ids, layout)
    if layout == "safeailab":
        config = _safeailab_config(spec)
    elif layout in _AS_SPECFORGE:
        config = _specforge_config(spec, layers)
        if layout == "compact":
            config["own_output"] = False
    else:
        config = _speculators_config(spec, layers, target_name, target_architectures)
        own = head.shared["embed_tokens"] is None
        trained = own if embeddings_were_trained is None else embeddings_were_trained
        config["embed_requires_grad"] = trained  # else readers may take the target's
    config["torch_dtype" if layout == "safeailab" else "dtype"] = str(head.dtype).removeprefix("torch.")
    file = "pytorch_model.bin" if layout == "safeailab" else "model.safetensors"
    write_checkpoint(path, file, tensors, config)


def check_layout(layout: str, spec: EagleSpec, num_target_layers: int | None = None) -> str:
    """The layout by its own name; "vllm" and "sglang" are those that they read.

    Args:
        num_target_layers: where it is known, the layers that the head reads are looked at, too.
    Raises:
        CheckpointError: files of `layout` cannot say what a head of this spec computes.
    """
    layout = _READERS.get(layout, layout)
    if layout not in _LIMITS:
        readers = ", ".join(f"{reader!r} for {name!r}" for reader, name in _READERS.items())
        raise CheckpointError(
            f"eagle: unknown layout {layout!r}; known are {', '.join(map(repr, _LIMITS))} ({readers})."
        )
    if limits := [name for name, is_needed in _LIMITS[layout] if is_needed(spec)]:
        raise CheckpointError(f"the {layout} layout cannot express this head: it has {', '.join(limits)}.")
    if num_target_layers is not None:
        _feature_layers(spec, layout, num_target_layers)
    return layout


def stores(layout: str, spec: EagleSpec) -> dict[str, bool]:
    """Whether files of a layout hold embeddings and output matrix even where these are the target's."""
    return {
        "embed_tokens": layout == "speculators" or spec.version == 1,
        "lm_head": spec.version == 3 and layout != "compact",
    }


def _feature_layers(spec: EagleSpec, layout: str, num_target_layers: int | None) -> list[int] | None:
    """The layers for a config; None: the default, which all layouts share and nobody needs to write."""
    if spec.version == 1:
        return None
    if num_target_layers is None:
        if spec.feature_layers is None and spec.dialect != "deepspec":
            return None
        if spec.feature_layers is None or layout == "safeailab":
            raise CheckpointError(
                f"a {spec.dialect} head as {layout}: which layers of the target it reads depends on the number of the "
                "target's layers: give the target (--target)."
            )
        num_target_layers = max(spec.feature_layers)  # resolves nothing
    layers, default = list(spec.resolved_layers(num_target_layers)), [2, num_target_layers // 2, num_target_layers - 3]
    if layout == "safeailab" and layers != default:
        raise CheckpointError(
            f"the safeailab layout cannot express this head: it has features of other layers than {default}."
        )
    if layout in _AS_SPECFORGE and 0 in layers:
        raise CheckpointError(f"the {layout} layout cannot express this head: it has the embeddings as a feature.")
    return layers


def _tensors(head: EagleHead, target_ids: Tensor | None, layout: str) -> dict[str, Tensor]:
    """Everything that the layout stores, under its names: own storage, on the CPU."""
    spec = head.spec
    tensors = dict(head.state_dict())
    keeps_shared = stores(layout, spec)
    for name, module in head.shared.items():
        if module is not None and keeps_shared[name]:
            if name == "embed_tokens":
                rows = embedding_rows(module, spec.vocab_size)
            else:
                rows = output_rows(module, spec.hidden_size, head.dtype)
            tensors[f"{name}.weight"] = rows
    if spec.version == 3 and (target_ids is not None or layout in _AS_SPECFORGE):
        tensors |= vocabulary_tensors(spec, target_ids)
    if layout in _AS_SPECFORGE and "norm.weight" not in tensors:
        tensors["norm.weight"] = torch.ones(spec.hidden_size, dtype=head.dtype)  # its module always has one
    if spec.version == 3 and layout != "speculators":
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _target_width(spec: EagleSpec) -> dict[str, int]:
    return {} if spec.target_hidden_size == spec.hidden_size else {"target_hidden_size": spec.target_hidden_size}


def _safeailab_config(spec: EagleSpec) -> dict[str, Any]:
    """As SafeAILab's own files: transformers 4 names, the switches of EAGLE-1 as flags."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **stated_sizes(spec)}
    config["rope_theta"] = spec.rope["rope_theta"]
    if spec.version == 1:
        return {**config, "bias": spec.fc_bias, "qkv_bias": spec.qkv_bias}
    return {**config, "draft_vocab_size": spec.draft_vocab_size, **_target_width(spec)}


def _specforge_config(spec: EagleSpec, layers: list[int] | None) -> dict[str, Any]:
    """As SpecForge's exporters: RoPE under both transformers' names, features as *outputs* of layers."""
    rope = dict(spec.rope)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **stated_sizes(spec),
        **_target_width(spec),
        "draft_vocab_size": spec.draft_vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_logits,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
    }
    if layers is not None:
        ids = [layer - 1 for layer in layers]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return config


def _speculators_config(
    spec: EagleSpec, layers: list[int] | None, target_name: str | None, target_architectures: list[str] | None
) -> dict[str, Any]:
    """As vllm-project/speculators: the layers' config nested and complete, features as `hidden_states` indices."""
    nested: Mapping[str, Any] = {
        "model_type": "qwen3" if spec.qk_norm else "llama",
        **stated_sizes(spec),
        "attention_bias": False,
        "rope_parameters": dict(spec.rope),
    }
    window = next((window for window in spec.windows if window), None)
    if window is not None:
        kinds = ["sliding_attention" if w else "full_attention" for w in spec.windows]
        nested = {**nested, "sliding_window": window, "use_sliding_window": True, "layer_types": kinds}
    masked = {"mask_token_id": spec.mask_token_id} if spec.parallel else {}
    return {
        "architectures": ["PEagleDraftModel" if spec.parallel else "Eagle3DraftModel"],
        "speculators_model_type": spec.algorithm,
        "speculators_version": "0.9.0",
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": _target_width(spec).get("target_hidden_size"),
        "eagle_aux_hidden_state_layer_ids": layers,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.feed_back_normed,
        **masked,
        "tie_word_embeddings": False,
        "transformer_layer_config": nested,
        "speculators_config": speculators_section(spec.algorithm, 5, target_name, target_architectures),
    }
