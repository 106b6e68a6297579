"""Checkpoints of one-pass heads in every published layout, read: tensors first, config second.

Sources: the files written by z-lab/dflash, hao-ai-lab/JetSpec, deepseek-ai/DeepSpec, sgl-project/SpecForge,
NVIDIA/Model-Optimizer, vllm-project/speculators and llama.cpp, and SGLang's readers of LFM2.5's DSpark heads and of
LiLiCorr. They share most names of tensors and differ in the config: where it lies, how layers of the target are
counted, which slots propose, which entries a slot sees. This module makes one `BlockSpec` of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_speculate.errors import CheckpointError

from ..checkpoints import (
    GGUF_ARCHITECTURE,
    ConfigValues,
    HeadFacts,
    Shapes,
    check_stated_size,
    mask_token_of,
    windows_of,
)
from ..heads import HeadFiles
from .defaults import CAUSALITY, DEFAULTS, Defaults
from .head import BlockHead, halves_of_pairs
from .lattice import Lattice, plain_name
from .spec import BlockConventions, BlockSpec, Dialect, MarkovKind, Method


_MAX_FEATURES, _MAX_BLOCK = 256, 512
_SIGNS = ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.k_proj.weight", "layers.0.input_layernorm.weight")
_MARKOV, _SELECTOR = "markov_head.markov_w1.weight", "candidate_selector.hidden_projection.weight"
_SIZED = ("t2d", "embed_tokens.weight", _MARKOV)
# Tensors of relatives whose forward pass is another, such as P-EAGLE.
_OTHER_FAMILIES = re.compile(r"^(mask_hidden|logit_head\.|midlayer\.|causal_refiner)")
_GRU, _REFINER = "markov_head.gru_state.weight", "markov_head.refiner.mlp_gate.weight"
# Beginnings of names in other layouts -> ours (DeepSpec's), by method; the first that fits counts.
NAMES: Mapping[Method, Mapping[str, str]] = {
    "dspark": {
        **{f"{part}.": f"markov_head.{part}." for part in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")},
        "confidence_proj.": "confidence_head.proj.",
    },
    "domino": {
        **{"prefix_gru.weight_ih_l0": "markov_head.gru_input.weight", "prefix_gru.weight_hh_l0": _GRU},
        **{"embed_proj.0.": "markov_head.joint_proj.", "embed_proj.2.": "markov_head.markov_w2."},
    },
    "xpress": {
        **{"refiner_head.token_embed.": "markov_head.markov_w1.", "refiner_head.readout.": "markov_head.markov_w2."},
        "refiner_head.": "markov_head.refiner.",
    },
}
_STARTS = [pair for names in NAMES.values() for pair in names.items()]
_SINK, _NEOX = "layers.0.self_attn.attention_sink_bias", "rope_is_neox_style"
_ROTATED = re.compile(r"^layers\.\d+\.self_attn\.[qk]_(proj|norm)\.")
# Fields of `BlockSpec` that conventions replace.
_OVERRIDES = ("feature_layers", "mask_token_id", "first_slot", "rope_interleaved")
_CONVOLUTIONS = ("conv_kernel_size", "conv_group_size")
_MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")  # those that DSpark's configs name


class BlockReading(HeadFiles[BlockSpec, BlockHead]):
    """The reading half of `BlockFiles`."""

    name, kind, section, layer_type = "block", "one-pass head", "dflash_config", "qwen3"
    head_class, conventions_class = BlockHead, BlockConventions
    config_says = "block_size, the mask token and RoPE"
    follows = ("use_swa", "attention_sink_bias", _NEOX)

    @classmethod
    def recognizes(cls, shapes: Shapes) -> bool:
        # The context's norm lies next to the layers, not in the first of them as EAGLE-3's does.
        return all(sign in shapes for sign in _SIGNS) and not any(_OTHER_FAMILIES.match(name) for name in shapes)

    @classmethod
    def canonical(cls, tensors: Mapping[str, Tensor], spec: BlockSpec | None = None) -> dict[str, Tensor]:
        def renamed(name: str) -> str:
            ours = next((to + name.removeprefix(start) for start, to in _STARTS if name.startswith(start)), name)
            ours = plain_name(ours)
            return name if ours in tensors else ours  # if a file has both names, the account must list both

        renamed_tensors = {renamed(name): tensor for name, tensor in tensors.items()}
        if spec is not None and spec.rope_interleaved:
            rotated = {name: tensor for name, tensor in renamed_tensors.items() if _ROTATED.match(name)}
            renamed_tensors |= {name: halves_of_pairs(rows, spec.head_dim) for name, rows in rotated.items()}
        return renamed_tensors

    @classmethod
    def spec_of(cls, stated: HeadFacts, conventions: BlockConventions) -> BlockSpec:
        shapes, fields = stated.shapes, stated.layer_fields()
        keys = _Keys.of(stated)
        fields["qk_norm"] |= stated.layers.text("model_type") == "qwen3"
        spec = BlockSpec(
            dialect=keys.dialect,
            **fields,
            **stated.vocabularies(_SIZED, ("lm_head.weight", "d2t")),
            **_features(stated, keys.dialect, fields["hidden_size"]),
            **_block(stated, keys, conventions.mask_token_id),
            **_visibility(stated, keys, fields["num_layers"]),
            **_scoring_parts(stated, keys),
            **_logits(keys),
            attention_bias="layers.0.self_attn.q_proj.bias" in shapes,
            own_embeddings="embed_tokens.weight" in shapes and "lm_head.weight" not in shapes,
            attention_sinks=keys.place("attention_sink_bias").flag("attention_sink_bias", _SINK in shapes),
            rope_interleaved=not keys.place(_NEOX).flag(_NEOX, True),
        )
        stated.check_sizes(spec)
        causal = spec.causal if conventions.causal is None else (conventions.causal,) * spec.num_layers
        changed = spec.overridden(conventions, _OVERRIDES, causal=causal)
        if changed.num_features != spec.num_features:
            raise CheckpointError(
                f"this head takes {spec.num_features} features, feature_layers names {changed.num_features}."
            )
        if changed.rope_interleaved and keys.dialect == "llama.cpp":
            raise CheckpointError(f"{stated.folder}: rope_interleaved is not for GGUF files, whose RoPE turns halves.")
        return changed

    @classmethod
    def unclear(cls, stated: HeadFacts, spec: BlockSpec) -> dict[str, str]:
        if _stated_layers(stated, spec.dialect):
            return {}
        return {"feature_layers": "which hidden states of the target it reads"}


def their_name(name: str, method: Method) -> str:
    """The name of a tensor in the layouts of `NAMES`."""
    pairs = NAMES.get(method, {}).items()
    return next((theirs + name.removeprefix(start) for theirs, start in pairs if name.startswith(start)), name)


@dataclass(frozen=True)
class _Keys:
    """The keys of a config that are special about one-pass heads.

    Attributes:
        dialect, method: kind of file.
        places: objects that may hold such a key; the first that does counts.
        defaults: meanings of absent keys.
    """

    dialect: Dialect
    method: Method
    places: tuple[ConfigValues, ...]
    defaults: Defaults

    @classmethod
    def of(cls, stated: HeadFacts) -> _Keys:
        dialect = _dialect(stated)
        is_flat = dialect in ("speculators", "llama.cpp")
        places = (stated.config,) if is_flat else (stated.nested, stated.config)
        method = _method(stated, dialect, places)
        return cls(dialect, method, places, DEFAULTS[dialect][method])

    def place(self, key: str) -> ConfigValues:
        """The object that holds a key, with the defaults of all keys."""
        return next((place for place in self.places if key in place), self.places[-1]).with_defaults(self.defaults)

    def flag(self, key: str) -> bool:
        return self.place(key).flag(key, False)

    def number(self, key: str) -> float:
        return self.place(key).number(key, 0.0)

    def first_flag(self, *names: str) -> bool | None:
        """The first of some flags that has a value; None if none has."""
        return next((self.flag(name) for name in names if name in self.place(name)), None)


def _dialect(stated: HeadFacts) -> Dialect:
    config, nested = stated.config, stated.nested
    if GGUF_ARCHITECTURE in config:
        return "llama.cpp"
    if "speculators_model_type" in config:
        return "speculators"
    architectures = config.texts("architectures")
    is_specforge = any(name.endswith("DSparkDraftModel") for name in architectures)
    projector = nested.text("projector_type", "dspark" if is_specforge else "dflash")
    if projector not in ("dflash", "dspark", "domino", "lilicorr"):
        raise nested.wrong("projector_type", "dflash, dspark, domino or lilicorr: others are computed in another way")
    if _has_lattice(stated):
        return "zlab"
    if projector != "dflash":
        return "modelopt" if projector == "domino" or "markov_w1.weight" in stated.names else "specforge"
    # DeepSpec names its DFlash heads as its DSpark heads, with a Markov head of rank 0.
    is_flat = "markov_rank" in config and "target_layer_ids" not in nested
    if is_flat or any("DSpark" in name for name in architectures):
        return "deepspec"
    # Plain DFlash of ModelOpt is z-lab's, but for a key that it always writes. NeMo Automodel's has is_causal as well.
    is_modelopt = "causal" in nested and "is_causal" not in config
    return "modelopt" if is_modelopt or nested.flag("use_swa", False) or _SINK in stated.shapes else "zlab"


def _has_lattice(stated: HeadFacts) -> bool:
    """Whether this is a LiLiCorr head. A plain DFlash head may have the keys, switched off."""
    nested = stated.nested
    is_on = any(key.startswith("lilicorr_") for key in nested.values) and nested.flag("lilicorr_enabled", True)
    is_stored = any(name.startswith("lilicorr.") for name in stated.shapes)
    return is_on or is_stored or nested.text("projector_type") == "lilicorr"


def _method(stated: HeadFacts, dialect: Dialect, places: tuple[ConfigValues, ...]) -> Method:
    config = stated.config
    if dialect == "llama.cpp":
        return "dspark" if _MARKOV in stated.shapes else "dflash"
    if dialect == "speculators":
        kind = config.text("speculators_model_type")
        if kind not in ("dflash", "dspark", "dflash2", "xpress"):
            raise config.wrong("speculators_model_type", "dflash, dspark, dflash2 or xpress")
        return kind
    if _has_lattice(stated):
        return "lilicorr"
    if stated.nested.text("projector_type") == "domino" or _GRU in stated.shapes:
        return "domino"
    if _SELECTOR in stated.shapes or any("selector_rank" in place for place in places):
        return "dflash2"
    return "dspark" if any(place.values.get("markov_rank") for place in places) else "dflash"


def _features(stated: HeadFacts, dialect: Dialect, hidden_size: int) -> dict[str, Any]:
    """Indices and width of the target's states. Ids in files are outputs of layers (-1: the embeddings); those of
    speculators and llama.cpp are indices into `hidden_states`."""
    config, adapter = stated.config, stated.shapes.get("hidden_dim_adapter.proj.weight")
    fc_size, layers = stated.shapes["fc.weight"][1], _stated_layers(stated, dialect)
    if not layers:
        if dialect not in ("zlab", "specforge"):
            raise CheckpointError(f"{config.where}: {config.file} lacks the target layers that the head reads.")
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


def _stated_layers(stated: HeadFacts, dialect: Dialect) -> tuple[int, ...]:
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


def _block(stated: HeadFacts, keys: _Keys, mask_token_id: int | None) -> dict[str, Any]:
    config, place = stated.config, keys.place("block_size")
    # llama.cpp's DFlash always drafts from the slot after the anchor.
    can_be_first = (keys.dialect, keys.method) != ("llama.cpp", "dflash")
    first_slot = 0 if can_be_first and keys.flag("sample_from_anchor") else 1
    block_size = place.size("block_size", most=_MAX_BLOCK)
    projector, shift = stated.nested.text("projector_type", keys.method), keys.place("shift_label")
    is_shifted = projector in ("dspark", "domino")
    if shift.flag("shift_label", is_shifted) != is_shifted:
        where = "true: slots propose the token after" if is_shifted else "false: slots propose the token at"
        raise shift.wrong("shift_label", f"{where} their place in heads of this kind, {keys.method}")
    if block_size <= first_slot:
        raise place.wrong("block_size", "at least one slot that proposes")
    token = mask_token_of(stated.nested, config) if mask_token_id is None else mask_token_id
    if token is None:
        raise CheckpointError(
            f"{config.where}: {config.file} lacks mask_token_id, the token in the slots after the anchor: pass "
            "mask_token_id=, the token used in training."
        )
    return {"method": keys.method, "block_size": block_size, "mask_token_id": token, "first_slot": first_slot}


def _visibility(stated: HeadFacts, keys: _Keys, num_layers: int) -> dict[str, Any]:
    """Reach of the slots: backwards, and among each other. One flag decides for all layers; without it layers with a
    window are causal, and others are not."""
    windows = windows_of(stated.layers, num_layers)
    if keys.dialect == "speculators":
        is_free = keys.flag("sliding_window_non_causal")
        causal = tuple(window is not None and not is_free for window in windows)
    else:
        # NeMo Automodel's JetSpec heads state both `causal` and, as its DFlash heads do, `is_causal: false`.
        whole = keys.first_flag(*CAUSALITY)
        kinds = [*stated.layers.texts("layer_types"), *("full_attention",) * num_layers]
        slides = (window or kind == "sliding_attention" for window, kind in zip(windows, kinds, strict=False))
        causal = tuple(bool(is_sliding) if whole is None else whole for is_sliding in slides)
    if keys.flag("use_swa"):
        windows = (_modelopt_window(stated, keys),) * num_layers
    return {"windows": windows, "causal": causal, "window_from_anchor": keys.dialect == "speculators"}


def _modelopt_window(stated: HeadFacts, keys: _Keys) -> int:
    """Window of all layers, whose types stay those of full attention. Slots see their whole block, so windows shorter
    than a block, which ModelOpt refuses too, would have another meaning than z-lab's."""
    place = keys.place("swa_window_size").with_defaults({"swa_window_size": stated.config.values.get("sliding_window")})
    block_size = keys.place("block_size").size("block_size")
    if keys.dialect == "speculators" or "sliding_attention" in stated.layers.texts("layer_types"):
        raise keys.place("use_swa").wrong("use_swa", "false where layer_types gives the windows")
    if (window := place.size("swa_window_size", most=1 << 40)) < block_size:
        raise place.wrong("swa_window_size", f"at least the block's {block_size}")
    return window


def _logits(keys: _Keys) -> dict[str, Any]:
    """Scales of embeddings and logits, in the layouts that have them."""
    if "output_multiplier" not in keys.defaults:
        return {}
    return {
        "embedding_scale": keys.number("input_embedding_scale"),
        "output_multiplier": keys.number("output_multiplier"),
        "softcap": keys.number("final_logit_softcapping") or None,
    }


def _scoring_parts(stated: HeadFacts, keys: _Keys) -> dict[str, Any]:
    """Markov head, confidence head, convolutions, selector."""
    shapes, has_confidence = stated.shapes, "confidence_head.proj.weight" in stated.shapes
    parts: dict[str, Any] = {}
    if keys.dialect == "llama.cpp":  # its Markov heads are vanilla, and confidence heads see their codes
        if _MARKOV in shapes:
            parts |= {"markov": "vanilla", "markov_rank": shapes[_MARKOV][1]}
        return parts | ({"confidence": True, "confidence_with_markov": True} if has_confidence else {})
    if keys.method in ("domino", "xpress"):
        return _path_part(stated, keys)
    if keys.method == "lilicorr":
        lattice = {"lattice": Lattice.read(stated.nested, shapes["fc.weight"][0])}
        return lattice | (_sizes(stated, keys, *_CONVOLUTIONS) if keys.number("conv_kernel_size") else {})
    rank, kind = keys.place("markov_rank"), keys.place("markov_head_type")
    if rank.values.get("markov_rank"):
        if kind.text("markov_head_type") not in _MARKOV_KINDS:
            raise kind.wrong("markov_head_type", f"one of {', '.join(_MARKOV_KINDS)}")
        parts |= {"markov": kind.text("markov_head_type"), "markov_rank": rank.size("markov_rank")}
    if has_confidence or keys.flag("enable_confidence_head") or keys.flag("use_confidence_head"):
        parts |= {"confidence": True, "confidence_with_markov": keys.flag("confidence_head_with_markov")}
    if keys.method == "dflash2":
        parts |= _sizes(stated, keys, "selector_rank", "selector_top_k", *_CONVOLUTIONS)
    return parts


def _sizes(stated: HeadFacts, keys: _Keys, *names: str) -> dict[str, Any]:
    """Sizes of the convolutions, the last of which divides the head's width, and of other parts."""
    sizes, width = {name: keys.place(name).size(name) for name in names}, stated.shapes["fc.weight"][0]
    if width % sizes[names[-1]]:
        raise keys.place(names[-1]).wrong(names[-1], f"a divisor of the head's width, {width}")
    return sizes


def _path_part(stated: HeadFacts, keys: _Keys) -> dict[str, Any]:
    """The Markov head of Domino or XPress. Its sizes are those of the tensors, which the config repeats."""
    shapes, rank = stated.shapes, stated.shapes["markov_head.markov_w2.weight"][1]
    if keys.method == "domino":
        size, place = shapes[_GRU][1], keys.place("pure_draft_prefix_len")
        num_bare, most = place.values["pure_draft_prefix_len"], keys.place("block_size").size("block_size") - 1
        if type(num_bare) is not int or not 0 <= num_bare <= most:
            raise place.wrong("pure_draft_prefix_len", f"an integer from 0 to {most}")
        sizes = {"gru_hidden_dim": size, "emb_dim": rank}
        parts: dict[str, Any] = {"markov": "domino", "gru_size": size, "num_bare_slots": num_bare}
    else:
        size = shapes[_REFINER][0]
        sizes = {"xpress_rank": rank, "xpress_mlp_ratio": size // rank}
        parts = {"markov": "xpress", "refiner_size": size}
    for key, value in sizes.items():
        check_stated_size(keys.place(key), key, value)
    return {**parts, "markov_rank": rank}
