"""Checkpoints of one-pass heads in every published layout, read: tensors first, config second.

Sources: the files written by z-lab/dflash, hao-ai-lab/JetSpec, deepseek-ai/DeepSpec, sgl-project/SpecForge,
vllm-project/speculators and llama.cpp. They share the tensors' names and differ in the config: where it lies, how
layers of the target are counted, which slots propose, what sees what. All of that ends here, in one `BlockSpec`.
"""

from __future__ import annotations

import re
from typing import Any

from hf_speculate.errors import CheckpointError

from ..checkpoints import GGUF_ARCHITECTURE, ConfigValues, Shapes, Stated, mask_token_of, windows_of
from ..heads import HeadFiles
from .head import BlockHead
from .spec import BlockConventions, BlockSpec, Dialect, MarkovKind, Method


_MAX_FEATURES, _MAX_BLOCK = 256, 512
_SIGNS = ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.k_proj.weight", "layers.0.input_layernorm.weight")
_MARKOV = "markov_head.markov_w1.weight"
_SIZED = ("t2d", "embed_tokens.weight", _MARKOV)
# Tensors of relatives whose forward pass is another: P-EAGLE, Domino, XPress.
_OTHER_FAMILIES = re.compile(r"^(mask_hidden|logit_head\.|prefix_gru\.|midlayer\.|causal_refiner)")
_MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")


class BlockReading(HeadFiles[BlockSpec, BlockHead]):
    """The reading half of `BlockFiles`."""

    name, kind, section = "block", "one-pass head", "dflash_config"
    head_class, conventions_class = BlockHead, BlockConventions
    config_says = "block_size, the mask token and RoPE"

    @classmethod
    def recognizes(cls, shapes: Shapes) -> bool:
        # The context's norm lies beside the layers, not in the first of them as EAGLE-3's does.
        return all(sign in shapes for sign in _SIGNS) and not any(_OTHER_FAMILIES.match(name) for name in shapes)

    @classmethod
    def spec_of(cls, stated: Stated, conventions: BlockConventions) -> BlockSpec:
        shapes, dialect, fields = stated.shapes, _dialect(stated), stated.layer_fields()
        nested = _special(stated, dialect)
        fields["qk_norm"] |= stated.layers.text("model_type") == "qwen3"
        spec = BlockSpec(
            dialect=dialect,
            **fields,
            **stated.vocabularies(_SIZED, ("lm_head.weight", "d2t")),
            **_features(stated, dialect, fields["hidden_size"]),
            **_block(stated, dialect, conventions.mask_token_id),
            **_visibility(stated, dialect, fields["num_layers"]),
            **_scoring_parts(stated, dialect),
            attention_bias="layers.0.self_attn.q_proj.bias" in shapes,
            embedding_scale=nested.number("input_embedding_scale", 1.0),
            output_multiplier=nested.number("output_multiplier", 1.0),
            softcap=nested.number("final_logit_softcapping", 0.0) or None,
        )
        stated.check_sizes(spec)
        causal = spec.causal if conventions.causal is None else (conventions.causal,) * spec.num_layers
        changed = spec.overridden(conventions, ("feature_layers", "mask_token_id", "first_slot"), causal=causal)
        if changed.num_features != spec.num_features:
            raise CheckpointError(
                f"this head takes {spec.num_features} features, feature_layers names {changed.num_features}."
            )
        return changed

    @classmethod
    def unclear(cls, stated: Stated, spec: BlockSpec) -> dict[str, str]:
        if _stated_layers(stated, spec.dialect):
            return {}
        return {"feature_layers": "which hidden states of the target it reads"}


def _dialect(stated: Stated) -> Dialect:
    config, nested = stated.config, stated.nested
    if GGUF_ARCHITECTURE in config:
        return "llama.cpp"
    if "speculators_model_type" in config:
        return "speculators"
    projector = nested.text("projector_type")
    if projector not in (None, "dflash", "dspark"):
        raise nested.wrong("projector_type", "dflash or dspark: other projectors are computed in another way")
    if projector == "dspark":
        return "specforge"
    # DeepSpec names its DFlash heads as its DSpark heads, with a Markov head of rank 0.
    is_deepspec = "markov_rank" in config or any("DSpark" in name for name in config.texts("architectures"))
    return "deepspec" if is_deepspec and not nested.values else "zlab"


def _special(stated: Stated, dialect: Dialect) -> ConfigValues:
    """The object with what is special about one-pass heads; metadata of GGUF files are flat."""
    return stated.config if dialect == "llama.cpp" else stated.nested


def _features(stated: Stated, dialect: Dialect, hidden_size: int) -> dict[str, Any]:
    """Indices and width of the target's states. Ids in files are outputs of layers (-1: the embeddings); those of
    speculators and llama.cpp are indices into `hidden_states`."""
    config, adapter = stated.config, stated.shapes.get("hidden_dim_adapter.proj.weight")
    fc_size, layers = stated.shapes["fc.weight"][1], _stated_layers(stated, dialect)
    if not layers:
        width = hidden_size if adapter else config.size("target_hidden_size", hidden_size)
        layers = _spread(config, fc_size // width)
    if not 0 < len(layers) <= _MAX_FEATURES or fc_size % len(layers):
        raise CheckpointError(
            f"{config.where}: fc.weight takes {fc_size} inputs, no multiple of the {len(layers)} target layers that "
            f"the config names ({list(layers)})."
        )
    return {
        "feature_layers": layers,
        "target_hidden_size": adapter[1] if adapter else fc_size // len(layers),
        "adapts_features": adapter is not None,
    }


def _stated_layers(stated: Stated, dialect: Dialect) -> tuple[int, ...]:
    if dialect in ("speculators", "llama.cpp"):
        return tuple(stated.config.indices("aux_hidden_state_layer_ids"))
    ids = stated.nested.indices("target_layer_ids") or stated.config.indices("target_layer_ids")
    return tuple(layer + 1 for layer in ids)


def _spread(config: ConfigValues, count: int) -> tuple[int, ...]:
    """The layers of files that name none: spread over outputs 1 … L - 3 of the target (z-lab's rule)."""
    depth = config.size("num_target_layers")
    if count == 1:
        return (depth // 2 + 1,)
    return tuple(round(1 + i * (depth - 4) / (count - 1)) + 1 for i in range(count))


def _block(stated: Stated, dialect: Dialect, mask_token_id: int | None) -> dict[str, Any]:
    config, nested = stated.config, stated.nested
    method = _method(stated, dialect)
    place = config if "block_size" in config else nested
    from_anchor = dialect in ("deepspec", "specforge")
    if dialect == "speculators":
        from_anchor = config.flag("sample_from_anchor", method == "dspark")
    elif dialect == "llama.cpp":  # its DFlash always drafts from the slot behind the anchor
        from_anchor = method == "dspark" and config.flag("sample_from_anchor", True)
    first_slot = 0 if from_anchor else 1
    default = 16 if dialect == "llama.cpp" and method == "dflash" else None  # as llama.cpp has it
    block_size = place.size("block_size", default, most=_MAX_BLOCK)
    if block_size <= first_slot:
        raise place.wrong("block_size", "at least one slot that proposes")
    token = mask_token_of(nested, config) if mask_token_id is None else mask_token_id
    if token is None:
        raise CheckpointError(
            f"{config.where}: {config.file} lacks mask_token_id, what the slots behind the anchor hold: give "
            "mask_token_id=..., what its training had."
        )
    return {"method": method, "block_size": block_size, "mask_token_id": token, "first_slot": first_slot}


def _method(stated: Stated, dialect: Dialect) -> Method:
    config, nested = stated.config, stated.nested
    if dialect == "llama.cpp":
        return "dspark" if _MARKOV in stated.shapes else "dflash"
    if dialect == "speculators":
        kind = config.text("speculators_model_type")
        if kind not in ("dflash", "dspark", "dflash2"):
            raise config.wrong("speculators_model_type", "dflash, dspark or dflash2")
        return kind
    if "selector_rank" in nested or "selector_rank" in config:
        return "dflash2"
    return "dspark" if (nested if dialect == "specforge" else config).values.get("markov_rank") else "dflash"


def _visibility(stated: Stated, dialect: Dialect, num_layers: int) -> dict[str, Any]:
    """Reach of the slots: backwards, and among each other. A layer with a window is causal unless the file says
    otherwise; one without is not, unless the whole head is (JetSpec)."""
    nested, windows = _special(stated, dialect), windows_of(stated.layers, num_layers)
    whole = nested.flag("causal_head", False) or nested.flag("causal", False)
    if dialect == "speculators":
        sliding = not stated.config.flag("sliding_window_non_causal", False)
    else:
        sliding = stated.config.flag("is_causal", True)
    return {
        "windows": windows,
        "causal": tuple(whole or (window is not None and sliding) for window in windows),
        "window_from_anchor": dialect == "speculators",
    }


def _scoring_parts(stated: Stated, dialect: Dialect) -> dict[str, Any]:
    """Markov head, confidence head, convolutions, selector."""
    shapes, config, nested = stated.shapes, stated.config, stated.nested
    place = nested if dialect == "specforge" else config
    found: dict[str, Any] = {}
    if dialect == "llama.cpp":  # tensors tell; its Markov heads are vanilla, and the confidence head sees their codes
        if _MARKOV in shapes:
            found |= {"markov": "vanilla", "markov_rank": shapes[_MARKOV][1]}
        if "confidence_head.proj.weight" in shapes:
            found |= {"confidence": True, "confidence_with_markov": True}
        return found
    if place.values.get("markov_rank"):
        kind = place.text("markov_head_type") or "vanilla"
        if kind not in _MARKOV_KINDS:
            raise place.wrong("markov_head_type", f"one of {', '.join(_MARKOV_KINDS)}")
        found |= {"markov": kind, "markov_rank": place.size("markov_rank")}
    if "confidence_head.proj.weight" in shapes or place.flag("enable_confidence_head", False):
        with_markov = place.flag("confidence_head_with_markov", False)
        found |= {"confidence": True, "confidence_with_markov": with_markov}
    place = config if "selector_rank" in config else nested
    if "selector_rank" in place:
        found |= {key: place.size(key) for key in ("selector_rank", "selector_top_k")}
        for key, default in (("conv_kernel_size", 2), ("conv_group_size", 16)):
            found[key] = place.size(key, default)
        if shapes["fc.weight"][0] % found["conv_group_size"]:
            raise place.wrong("conv_group_size", f"a divisor of the head's width, {shapes['fc.weight'][0]}")
    return found
