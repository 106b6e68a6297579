"""Which layout a one-pass head has, and what it says: tensors first, config second.

Sources: the files written by z-lab/dflash, hao-ai-lab/JetSpec, deepseek-ai/DeepSpec, sgl-project/SpecForge and
vllm-project/speculators. They share the tensors' names and differ in the config: where it lies, how layers of the
target are counted, which slots propose, what sees what. All of that ends here, in one `BlockSpec`.
"""

from __future__ import annotations

import re
from typing import Any

from hf_speculate.errors import CheckpointError

from ...checkpoints import (
    Checkpoint,
    ConfigValues,
    Shapes,
    attention_sizes,
    check_dimensions,
    check_stated_sizes,
    layer_config_of,
    listed,
    mask_token_of,
    num_layers_of,
    refuse_switches,
    rope_of,
    windows_of,
)
from ..spec import BlockSpec, Dialect, MarkovKind, Method


_MAX_FEATURES, _MAX_BLOCK = 256, 512
_SIGNS = ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.k_proj.weight", "layers.0.input_layernorm.weight")
# Of relatives whose forward pass is another: P-EAGLE, Domino, XPress.
_OTHER_FAMILIES = re.compile(r"^(mask_hidden|logit_head\.|prefix_gru\.|midlayer\.|causal_refiner)")
_MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")


def is_block_head(shapes: Shapes) -> bool:
    """Whether tensors of these names and shapes are a one-pass head: the context's norm lies beside the layers, not in
    the first of them as EAGLE-3's does."""
    return all(sign in shapes for sign in _SIGNS) and not any(_OTHER_FAMILIES.match(name) for name in shapes)


def describe(checkpoint: Checkpoint, mask_token_id: int | None = None) -> BlockSpec:
    """The spec of a checkpoint.

    Args:
        mask_token_id: what is embedded in the slots behind the anchor; None: what the config says.
    Raises:
        CheckpointError: not a one-pass head, or a config that lacks or contradicts what the tensors need.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    if not is_block_head(shapes):
        raise CheckpointError(f"{checkpoint.folder} holds no one-pass head: {listed(sorted(shapes), 8)} …")
    if not checkpoint.config:
        raise CheckpointError(
            f"{checkpoint.folder} has no config.json, which says block_size, the mask token and RoPE: copy it from "
            "where the head is from."
        )
    check_dimensions(checkpoint.folder, shapes)
    config = ConfigValues(checkpoint.folder, checkpoint.config)
    nested, layer_config = config.inner("dflash_config"), layer_config_of(config)
    refuse_switches(config, layer_config, nested)
    dialect = _dialect(config, nested)
    num_layers = num_layers_of(checkpoint.folder, shapes)
    try:
        sizes = attention_sizes(shapes, layer_config)
        spec = BlockSpec(
            dialect=dialect,
            num_layers=num_layers,
            intermediate_size=shapes["layers.0.mlp.gate_proj.weight"][0],
            **sizes,
            **_vocabularies(shapes, layer_config),
            **_features(shapes, config, nested, dialect, num_layers, sizes["hidden_size"]),
            **_block(config, nested, dialect, mask_token_id),
            **_visibility(config, nested, layer_config, dialect, num_layers),
            **_conditions(shapes, config, nested, dialect),
            hidden_act=layer_config.text("hidden_act") or "silu",
            rms_norm_eps=layer_config.number("rms_norm_eps", 1e-6),
            attention_bias="layers.0.self_attn.q_proj.bias" in shapes,
            mlp_bias="layers.0.mlp.gate_proj.bias" in shapes,
            qk_norm="layers.0.self_attn.q_norm.weight" in shapes or layer_config.text("model_type") == "qwen3",
            rope=rope_of(layer_config),
            max_position_embeddings=layer_config.size("max_position_embeddings", 2048, most=1 << 40),
            embedding_scale=nested.number("input_embedding_scale", 1.0),
            output_multiplier=nested.number("output_multiplier", 1.0),
            softcap=nested.number("final_logit_softcapping", 0.0) or None,
        )
    except KeyError as error:
        raise CheckpointError(f"{checkpoint.folder}: the weights lack {error}.") from error
    check_stated_sizes(config, layer_config, spec)
    return spec


def _dialect(config: ConfigValues, nested: ConfigValues) -> Dialect:
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


def _vocabularies(shapes: Shapes, layer_config: ConfigValues) -> dict[str, int]:
    names = ("t2d", "embed_tokens.weight", "markov_head.markov_w1.weight")
    known = [shapes[name][0] for name in names if name in shapes]
    vocab_size = known[0] if known else layer_config.size("vocab_size")
    drafted = [shapes[name][0] for name in ("lm_head.weight", "d2t") if name in shapes]
    return {"vocab_size": vocab_size, "draft_vocab_size": drafted[0] if drafted else vocab_size}


def _features(
    shapes: Shapes, config: ConfigValues, nested: ConfigValues, dialect: Dialect, num_layers: int, hidden_size: int
) -> dict[str, Any]:
    """Which of the target's states, and how wide. Ids in files are outputs of layers (-1: the embeddings); those of
    speculators are indices into `hidden_states`."""
    fc_size, adapter = shapes["fc.weight"][1], shapes.get("hidden_dim_adapter.proj.weight")
    layers = _stated_layers(config, nested, dialect)
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


def _stated_layers(config: ConfigValues, nested: ConfigValues, dialect: Dialect) -> tuple[int, ...]:
    if dialect == "speculators":
        return tuple(config.indices("aux_hidden_state_layer_ids"))
    ids = nested.indices("target_layer_ids") or config.indices("target_layer_ids")
    return tuple(layer + 1 for layer in ids)


def unclear(config: ConfigValues, spec: BlockSpec) -> dict[str, str]:
    """What the files leave open, by the option of `Conventions` that decides it."""
    if _stated_layers(config, config.inner("dflash_config"), spec.dialect):
        return {}
    return {"feature_layers": "which hidden states of the target it reads"}


def _spread(config: ConfigValues, count: int) -> tuple[int, ...]:
    """The layers of files that name none: spread over outputs 1 … L - 3 of the target (z-lab's rule)."""
    depth = config.size("num_target_layers")
    if count == 1:
        return (depth // 2 + 1,)
    return tuple(round(1 + i * (depth - 4) / (count - 1)) + 1 for i in range(count))


def _block(config: ConfigValues, nested: ConfigValues, dialect: Dialect, mask_token_id: int | None) -> dict[str, Any]:
    method = _method(config, nested, dialect)
    place = config if "block_size" in config else nested
    from_anchor = dialect in ("deepspec", "specforge")
    if dialect == "speculators":
        from_anchor = config.flag("sample_from_anchor", method == "dspark")
    first_slot = 0 if from_anchor else 1
    block_size = place.size("block_size", most=_MAX_BLOCK)
    if block_size <= first_slot:
        raise place.wrong("block_size", "at least one slot that proposes")
    return {
        "method": method,
        "block_size": block_size,
        "mask_token_id": _mask_token_id(config, nested) if mask_token_id is None else mask_token_id,
        "first_slot": first_slot,
    }


def _method(config: ConfigValues, nested: ConfigValues, dialect: Dialect) -> Method:
    if dialect == "speculators":
        kind = config.text("speculators_model_type")
        if kind not in ("dflash", "dspark", "dflash2"):
            raise config.wrong("speculators_model_type", "dflash, dspark or dflash2")
        return kind
    has_selector = "selector_rank" in nested or "selector_rank" in config
    if has_selector:
        return "dflash2"
    return "dspark" if (nested if dialect == "specforge" else config).values.get("markov_rank") else "dflash"


def _mask_token_id(config: ConfigValues, nested: ConfigValues) -> int:
    token = mask_token_of(nested, config)
    if token is None:
        raise CheckpointError(
            f"{config.where}: config.json lacks mask_token_id, what the slots behind the anchor hold: give "
            "mask_token_id=..., what its training had."
        )
    return token


def _visibility(
    config: ConfigValues, nested: ConfigValues, layer_config: ConfigValues, dialect: Dialect, num_layers: int
) -> dict[str, Any]:
    """What slots see of each other, and how far back they see. A layer with a window is causal unless the file says
    otherwise; one without is not, unless the whole head is (JetSpec)."""
    windows = windows_of(layer_config, num_layers)
    whole = nested.flag("causal_head", False) or nested.flag("causal", False)
    if dialect == "speculators":
        sliding = not config.flag("sliding_window_non_causal", False)
    else:
        sliding = config.flag("is_causal", True)
    return {
        "windows": windows,
        "causal": tuple(whole or (window is not None and sliding) for window in windows),
        "window_from_anchor": dialect == "speculators",
    }


def _conditions(shapes: Shapes, config: ConfigValues, nested: ConfigValues, dialect: Dialect) -> dict[str, Any]:
    """Markov head, confidence head, convolutions, selector."""
    place = nested if dialect == "specforge" else config
    found: dict[str, Any] = {}
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
