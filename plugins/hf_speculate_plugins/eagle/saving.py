"""EAGLE heads written in the published layouts, so that the projects of a layout load them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_speculate.errors import CheckpointError

from ..checkpoints import (
    GGUF_ARCHITECTURE,
    GGUF_FILE,
    GGUF_ROPE,
    OpenedHead,
    TargetFiles,
    speculators_section,
    stated_sizes,
    vocabulary_tensors,
)
from ..heads import Limit, Written
from .head import EagleHead
from .loading import EagleReading
from .spec import EagleSpec


# "compact" is SpecForge's without what the target has anyway: only hf_speculate reads it; `convert` makes the others of
# it. "llama.cpp" is a GGUF file, which also holds the target's tokenizer.
_AS_SPECFORGE = ("specforge", "compact")

_NORMS_OF_HEADS: Limit = ("norms of queries and keys", lambda spec: spec.qk_norm)
# One layer of Llama after three features.
_ONE_LAYER: tuple[Limit, ...] = (
    ("more than one layer", lambda spec: spec.num_layers > 1),
    _NORMS_OF_HEADS,
    ("a normed state fed back", lambda spec: spec.feed_back_normed),
    ("sliding windows", lambda spec: any(spec.windows)),
    ("other than three features", lambda spec: spec.version == 3 and spec.num_features != 3),
    ("the mask of P-EAGLE", lambda spec: spec.parallel),
)
_NEEDS_SPECULATORS: tuple[Limit, ...] = (
    *_ONE_LAYER,
    ("norm_before_fc", lambda spec: spec.norm_before_fc),
    ("norm_before_residual", lambda spec: spec.norm_before_residual),
)
_COMMON: tuple[Limit, ...] = (
    ("a first layer without a norm on the embedding", lambda spec: not spec.norm_embedding),
    ("biases of output projections", lambda spec: spec.o_bias or spec.mlp_bias),
    ("biases in EAGLE-3", lambda spec: spec.version == 3 and (spec.fc_bias or spec.qkv_bias)),
)
_SPECFORGE: tuple[Limit, ...] = (*_COMMON, *_NEEDS_SPECULATORS, ("EAGLE-1", lambda spec: spec.version == 1))


_LIMITS: dict[str, tuple[Limit, ...]] = {
    "safeailab": (
        *_COMMON,
        *_NEEDS_SPECULATORS,
        ("a norm of every feature", lambda spec: spec.fc_norm),
        ("logits without a norm", lambda spec: spec.version == 3 and not spec.norm_logits),
        ("a head size other than hidden size / heads", lambda s: s.head_dim * s.num_heads != s.hidden_size),
        ("RoPE scaling", lambda spec: spec.rope["rope_type"] != "default"),
    ),
    "specforge": _SPECFORGE,
    "compact": (
        # Its only reader is ours, which finds these norms by their tensors.
        *(limit for limit in _SPECFORGE if limit is not _NORMS_OF_HEADS),
        ("an output matrix of its own", lambda spec: spec.own_output),
    ),
    "speculators": (
        *_COMMON,
        ("EAGLE-1", lambda spec: spec.version == 1),
        ("logits without a norm", lambda spec: not spec.norm_logits),
        ("windows of different lengths", lambda spec: len({w for w in spec.windows if w}) > 1),
        ("a mask token without a known id", lambda spec: spec.parallel and spec.mask_token_id is None),
    ),
    "llama.cpp": (
        *_COMMON,
        *_ONE_LAYER,
        ("EAGLE-1", lambda spec: spec.version == 1),
        ("a norm of every feature (fc_norm)", lambda spec: spec.fc_norm),
        ("logits without a norm", lambda spec: spec.version == 3 and not spec.norm_logits),
        ("an activation other than SiLU", lambda spec: spec.hidden_act != "silu"),
        (f"RoPE other than {', '.join(GGUF_ROPE)}", lambda spec: spec.rope["rope_type"] not in GGUF_ROPE),
    ),
}


class EagleFiles(EagleReading):
    """The files of EAGLE heads."""

    readers: ClassVar = {"vllm": "speculators", "sglang": "specforge"}
    limits: ClassVar = _LIMITS

    @classmethod
    def check_layout(cls, layout: str, spec: EagleSpec, num_target_layers: int | None = None) -> str:
        layout = super().check_layout(layout, spec)
        if num_target_layers is not None:
            _feature_layers(spec, layout, num_target_layers)
        return layout

    @classmethod
    def default_layout(cls, spec: EagleSpec) -> str:
        return "speculators" if spec.version == 3 else "safeailab"

    @classmethod
    def layout_of(cls, spec: EagleSpec) -> str:
        if spec.version == 1:
            return "safeailab"
        return spec.dialect if spec.own_output or spec.dialect == "llama.cpp" else "compact"

    @classmethod
    def stores(cls, layout: str, spec: EagleSpec) -> dict[str, bool]:
        return {
            "embed_tokens": layout == "speculators" or spec.version == 1,
            # llama.cpp takes the target's whole matrix where the file has none.
            "lm_head": spec.version == 3
            and layout != "compact"
            and (layout != "llama.cpp" or spec.own_output or spec.draft_vocab_size != spec.vocab_size),
        }

    @classmethod
    def written(cls, head: EagleHead, target_ids: Tensor | None, layout: str, of_target: Mapping[str, Any]) -> Written:
        spec = head.spec
        layers = _feature_layers(spec, layout, of_target["num_target_layers"])
        tensors, dtype = cls._tensors(head, target_ids, layout), str(head.dtype).removeprefix("torch.")
        if layout == "safeailab":
            return "pytorch_model.bin", tensors, {**_safeailab_config(spec), "torch_dtype": dtype}
        if layout == "llama.cpp":
            return GGUF_FILE, tensors, _llamacpp_config(spec, layers, of_target)
        if layout in _AS_SPECFORGE:
            config = _specforge_config(spec, layers)
            if layout == "compact":
                config["own_output"] = False
        else:
            config = _speculators_config(spec, layers, of_target)
            trained = of_target.get("embeddings_were_trained")
            # Without this key readers may take the target's embeddings.
            config["embed_requires_grad"] = head.shared["embed_tokens"] is None if trained is None else trained
        return "model.safetensors", tensors, {**config, "dtype": dtype}

    @classmethod
    def _tensors(cls, head: EagleHead, target_ids: Tensor | None, layout: str) -> dict[str, Tensor]:
        """The tensors that the layout stores, under its names."""
        spec, tensors = head.spec, cls.stored(head, layout)
        if spec.version == 3 and (target_ids is not None or layout in _AS_SPECFORGE):
            tensors |= vocabulary_tensors(spec, target_ids)
        if layout in _AS_SPECFORGE and "norm.weight" not in tensors:
            tensors["norm.weight"] = torch.ones(
                spec.hidden_size, dtype=head.dtype, device="cpu"
            )  # its module always has one
        if spec.version == 3 and layout not in ("speculators", "llama.cpp"):
            tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        return tensors

    @classmethod
    def _output(cls, opened: OpenedHead[EagleSpec], layout: str, target: TargetFiles | None) -> Any:
        # Unlike one-pass heads, files keep a matrix of their own even where it is a copy.
        return None if "lm_head.weight" in opened.checkpoint.tensors else super()._output(opened, layout, target)


def _feature_layers(spec: EagleSpec, layout: str, num_target_layers: int | None) -> list[int] | None:
    """The layers for a config; None: the default, which all layouts share and need not hold."""
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


def _target_width(spec: EagleSpec) -> dict[str, int]:
    return {} if spec.target_hidden_size == spec.hidden_size else {"target_hidden_size": spec.target_hidden_size}


def _safeailab_config(spec: EagleSpec) -> dict[str, Any]:
    """The config of SafeAILab's own files: transformers 4 names, the switches of EAGLE-1 as flags."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **stated_sizes(spec)}
    config["rope_theta"] = spec.rope["rope_theta"]
    if spec.version == 1:
        return {**config, "bias": spec.fc_bias, "qkv_bias": spec.qkv_bias}
    return {**config, "draft_vocab_size": spec.draft_vocab_size, **_target_width(spec)}


def _specforge_config(spec: EagleSpec, layers: list[int] | None) -> dict[str, Any]:
    """The config of SpecForge's exporters: RoPE under both transformers' names, features as *outputs* of layers."""
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


def _llamacpp_config(spec: EagleSpec, layers: list[int] | None, of_target: Mapping[str, Any]) -> dict[str, Any]:
    """The config that `read_checkpoint` makes of llama.cpp's files: features as `hidden_states` indices."""
    return {
        GGUF_ARCHITECTURE: "eagle3",
        **stated_sizes(spec),
        "rope_parameters": dict(spec.rope),
        "eagle_aux_hidden_state_layer_ids": layers,
        "target_hidden_size": spec.target_hidden_size,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "base_model_name_or_path": of_target.get("target_name"),
    }


def _speculators_config(spec: EagleSpec, layers: list[int] | None, of_target: Mapping[str, Any]) -> dict[str, Any]:
    """The config of vllm-project/speculators: that of the layers nested, features as `hidden_states` indices."""
    nested: dict[str, Any] = {
        "model_type": "qwen3" if spec.qk_norm else "llama",
        **stated_sizes(spec),
        "attention_bias": False,
        "rope_parameters": dict(spec.rope),
    }
    window = next((window for window in spec.windows if window), None)
    if window is not None:
        kinds = ["sliding_attention" if w else "full_attention" for w in spec.windows]
        nested |= {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds}
    masked = {"mask_token_id": spec.mask_token_id} if spec.parallel else {}
    names = of_target.get("target_name"), of_target.get("target_architectures")
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
        "speculators_config": speculators_section(spec.algorithm, 5, *names),
    }
