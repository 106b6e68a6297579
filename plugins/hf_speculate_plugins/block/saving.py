"""One-pass heads written in the published layouts, so that the projects of a layout load them.

SpecForge's layout is read and not written: its own inference reads the slots of DSpark heads one place off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from hf_speculate.errors import CheckpointError

from ..checkpoints import GGUF_ARCHITECTURE, GGUF_FILE, GGUF_ROPE, speculators_section, stated_sizes, vocabulary_tensors
from ..heads import Limit, Written
from .head import BlockHead
from .loading import BlockReading, their_name
from .spec import BlockSpec


_COMMON: tuple[Limit, ...] = (
    ("projections with biases", lambda spec: spec.attention_bias or spec.mlp_bias),
    ("layers without norms of queries and keys", lambda spec: not spec.qk_norm),
    ("windows of different lengths", lambda spec: len({window for window in spec.windows if window}) > 1),
    ("causality that is not that of its windows", lambda spec: len(_causal_kinds(spec)) > 1),
)
_DOMINO: Limit = ("Domino's recurrent state", lambda spec: spec.gru_size > 0)
_XPRESS: Limit = ("XPress's refiner", lambda spec: spec.refiner_size > 0)
_LATTICE: Limit = ("LiLiCorr's lattice", lambda spec: spec.lattice is not None)
_SINKS: Limit = ("attention sinks", lambda spec: spec.attention_sinks)
_FULL_VOCABULARY: Limit = ("a draft vocabulary of its own", lambda spec: spec.draft_vocab_size != spec.vocab_size)
_LOGITS: Limit = (
    "changed logits or embeddings",
    lambda spec: (spec.embedding_scale, spec.output_multiplier, spec.softcap) != (1, 1, None),
)
_OTHER_WIDTH: Limit = (
    "features of another width than its own",
    lambda spec: spec.adapts_features or spec.target_hidden_size != spec.hidden_size,
)
_SELECTOR_PART: Limit = ("convolutions and a selector", lambda spec: spec.selector_rank > 0)
_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def _odd_windows(spec: BlockSpec) -> bool:
    lengths = {window or 0 for window in spec.windows}
    return any(lengths) and (spec.window_from_anchor or min(lengths) < spec.block_size)


_LIMITS: dict[str, tuple[Limit, ...]] = {
    "zlab": (
        *_COMMON,
        _SINKS,
        _FULL_VOCABULARY,
        ("a Markov or confidence head", lambda spec: spec.markov is not None or spec.confidence),
        ("slots that propose the token after their own place", lambda spec: spec.first_slot == 0),
        ("windows counted from the anchor", lambda spec: spec.window_from_anchor and any(spec.windows)),
    ),
    "deepspec": (
        *_COMMON,
        _SINKS,
        _DOMINO,
        _XPRESS,
        _LATTICE,
        _FULL_VOCABULARY,
        _LOGITS,
        _SELECTOR_PART,
        ("slots that propose the token at their own place", lambda spec: spec.first_slot == 1),
        ("windows", lambda spec: any(spec.windows)),
        ("causal layers", lambda spec: any(spec.causal)),
        _OTHER_WIDTH,
    ),
    "modelopt": (
        *_COMMON,
        _XPRESS,
        _LATTICE,
        _FULL_VOCABULARY,
        _LOGITS,
        _SELECTOR_PART,
        _OTHER_WIDTH,
        ("embeddings of its own", lambda spec: spec.own_embeddings),
        ("windows of which some count from the anchor, are shorter than a block or leave layers out", _odd_windows),
        ("layers of which some are causal", lambda spec: len(set(spec.causal)) > 1),
        ("slots of a Markov head at their own place, or others after it", lambda s: s.first_slot == bool(s.markov)),
        ("a confidence head that sees no Markov codes", lambda s: s.confidence and not s.confidence_with_markov),
    ),
    "speculators": (
        *_COMMON,
        _SINKS,
        _DOMINO,
        _LATTICE,
        _LOGITS,
        ("windows counted from each slot", lambda spec: not spec.window_from_anchor and any(spec.windows)),
        (
            "causal layers without windows",
            lambda s: any(c and not w for c, w in zip(s.causal, s.windows, strict=True)),
        ),
        ("an adapter of its features", lambda spec: spec.adapts_features),
    ),
    "llama.cpp": (
        *_COMMON,
        _SINKS,
        _LATTICE,
        _OTHER_WIDTH,
        ("windows", lambda spec: any(spec.windows)),
        ("layers of which some are causal", lambda spec: len(set(spec.causal)) > 1),
        _SELECTOR_PART,
        ("a Markov head that is not vanilla", lambda spec: spec.markov not in (None, "vanilla")),
        ("a confidence head that sees no Markov codes", lambda s: s.confidence and not s.confidence_with_markov),
        ("an anchor's slot that proposes, without a Markov head", lambda s: s.first_slot == 0 and s.markov is None),
        # llama.cpp's DFlash ranks logits, whose order neither changes; a Markov head adds to them.
        (
            "a Markov head on changed logits",
            lambda s: s.markov is not None and (s.output_multiplier, s.softcap) != (1, None),
        ),
        ("an activation other than SiLU", lambda spec: spec.hidden_act != "silu"),
        ("RoPE scaling", lambda spec: spec.rope["rope_type"] not in GGUF_ROPE),
    ),
}


class BlockFiles(BlockReading):
    """The files of one-pass heads."""

    readers: ClassVar = {"vllm": "speculators", "dflash": "zlab"}
    limits: ClassVar = _LIMITS

    @classmethod
    def default_layout(cls, spec: BlockSpec) -> str:
        """The layout that the head was read from, or the first that can express it."""
        layouts = ("speculators", "deepspec", "zlab", "modelopt")
        layouts = sorted(layouts, key=lambda layout: layout != spec.dialect)  # stable
        return next((layout for layout in layouts if not cls.problems(layout, spec)), layouts[0])

    @classmethod
    def stores(cls, layout: str, spec: BlockSpec) -> dict[str, bool]:
        # llama.cpp takes what is not in the file from the target, but with a draft vocabulary no matrix.
        has_rows = layout == "llama.cpp" and spec.draft_vocab_size != spec.vocab_size
        return {"embed_tokens": layout == "deepspec", "lm_head": layout == "deepspec" or has_rows}

    @classmethod
    def written(cls, head: BlockHead, target_ids: Tensor | None, layout: str, of_target: Mapping[str, Any]) -> Written:
        spec, tensors = head.spec, cls.stored(head, layout)
        if target_ids is not None:
            tensors |= vocabulary_tensors(spec, target_ids)
        if layout == "llama.cpp":
            if "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors:
                raise CheckpointError(
                    "the llama.cpp layout cannot express this head: it has embeddings of its own and the target's "
                    "output matrix, and llama.cpp would take the embeddings for both."
                )
            return GGUF_FILE, tensors, _llamacpp_config(spec, of_target)
        if layout == "modelopt" or spec.method == "xpress":
            tensors = {their_name(name, spec.method): tensor for name, tensor in tensors.items()}
        if layout == "speculators":
            config = _speculators_config(spec, of_target)
        else:
            special = {"zlab": _zlab_config, "deepspec": _deepspec_config, "modelopt": _modelopt_config}[layout]
            config = {**_sizes(spec), **special(spec)}
            names = {"num_target_layers": "num_target_layers", "target_name": "base_model_name_or_path"}
            config |= {key: of_target[name] for name, key in names.items() if of_target.get(name) is not None}
        return "model.safetensors", tensors, {**config, "dtype": str(head.dtype).removeprefix("torch.")}


def _causal_kinds(spec: BlockSpec) -> set[tuple[bool, bool]]:
    """The pairs (has a window, is causal) of the layers. Layers that have neither are left out: they need no key."""
    kinds = {(window is not None, causal) for window, causal in zip(spec.windows, spec.causal, strict=True)}
    return kinds - {(False, False)}


def _sizes(spec: BlockSpec) -> dict[str, Any]:
    window = next((window for window in spec.windows if window), None)
    return {
        "model_type": "qwen3",
        **stated_sizes(spec),
        "attention_bias": False,
        "rope_parameters": dict(spec.rope),
        "layer_types": ["sliding_attention" if w else "full_attention" for w in spec.windows],
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }


def _zlab_config(spec: BlockSpec) -> dict[str, Any]:
    """The config of z-lab's own files, and JetSpec's: what is special lies in `dflash_config`."""
    nested: dict[str, Any] = {"mask_token_id": spec.mask_token_id, "target_layer_ids": _outputs(spec)}
    names = {"dflash2": "DFlash2DraftModel", "lilicorr": "LiLiCorrDraftModel"}
    config: dict[str, Any] = {"architectures": [names.get(spec.method, "DFlashDraftModel")]}
    if spec.target_hidden_size != spec.hidden_size:
        config["target_hidden_size"] = spec.target_hidden_size
    if (False, True) in _causal_kinds(spec):
        nested["causal_head"] = config["is_causal"] = True  # JetSpec's key, and that of z-lab and vLLM
    if (True, False) in _causal_kinds(spec):
        config["is_causal"] = False  # the key is of all layers; without it those with a window are causal
    nested |= {key: value for key in _SELECTOR if (value := getattr(spec, key))}
    nested |= {} if spec.lattice is None else spec.lattice.stated()
    for key, value, default in (
        ("input_embedding_scale", spec.embedding_scale, 1.0),
        ("output_multiplier", spec.output_multiplier, 1.0),
        ("final_logit_softcapping", spec.softcap, None),
    ):
        if value != default:
            nested[key] = value
    place = nested if spec.selector_rank else config
    place["block_size"] = spec.block_size
    return {**config, "dflash_config": nested}


def _modelopt_config(spec: BlockSpec) -> dict[str, Any]:
    """The config of ModelOpt's exporter: windows are of all layers, and not in their types."""
    window = spec.windows[0]
    nested: dict[str, Any] = {"mask_token_id": spec.mask_token_id, "target_layer_ids": _outputs(spec)}
    nested["causal"] = all(spec.causal)
    if window is not None:
        nested |= {"use_swa": True, "swa_window_size": window}
    if spec.attention_sinks:
        nested["attention_sink_bias"] = True
    if spec.markov is not None:
        nested |= {"projector_type": spec.method, "shift_label": True}
    if spec.method == "dspark":
        nested |= {"use_confidence_head": spec.confidence}
        nested |= {"markov_rank": spec.markov_rank, "markov_head_type": spec.markov}
    if spec.method == "domino":
        nested |= {"gru_hidden_dim": spec.gru_size, "emb_dim": spec.markov_rank}
        nested |= {"pure_draft_prefix_len": spec.num_bare_slots}
    return {
        "architectures": ["DFlashDraftModel"],
        "block_size": spec.block_size,
        "layer_types": ["full_attention"] * spec.num_layers,
        "use_sliding_window": False,
        "dflash_config": nested,
    }


def _deepspec_config(spec: BlockSpec) -> dict[str, Any]:
    """The config of DeepSpec's files: everything at the top; DFlash heads are DSpark heads of Markov rank 0."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": _outputs(spec),
        "markov_rank": spec.markov_rank,
        "enable_confidence_head": spec.confidence,
    }
    if spec.markov is not None:
        config |= {"markov_head_type": spec.markov, "confidence_head_with_markov": spec.confidence_with_markov}
    return config


def _llamacpp_config(spec: BlockSpec, of_target: Mapping[str, Any]) -> dict[str, Any]:
    """The config that `read_checkpoint` makes of llama.cpp's files: features as `hidden_states` indices."""
    logits = {
        "input_embedding_scale": (spec.embedding_scale, 1.0),
        "output_multiplier": (spec.output_multiplier, 1.0),
        "final_logit_softcapping": (spec.softcap, None),
    }
    markov = {"sample_from_anchor": spec.first_slot == 0, "enable_confidence_head": spec.confidence}
    return {
        GGUF_ARCHITECTURE: "dflash",
        **stated_sizes(spec),
        "rope_parameters": dict(spec.rope),
        "aux_hidden_state_layer_ids": list(spec.feature_layers),
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "causal": all(spec.causal),
        **({} if spec.markov is None else markov),
        **{key: value for key, (value, default) in logits.items() if value != default},
        "base_model_name_or_path": of_target.get("target_name"),
    }


def _speculators_config(spec: BlockSpec, of_target: Mapping[str, Any]) -> dict[str, Any]:
    """The config of vllm-project/speculators: that of the layers nested, features as `hidden_states` indices."""
    names = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2", "xpress": "XPress"}
    is_wide = spec.target_hidden_size != spec.hidden_size
    of_verifier = of_target.get("target_name"), of_target.get("target_architectures")
    config: dict[str, Any] = {
        "architectures": [f"{names[spec.method]}DraftModel"],
        "speculators_model_type": spec.method,
        "speculators_version": "0.9.0",
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": spec.first_slot == 0,
        "sliding_window_non_causal": (True, False) in _causal_kinds(spec),
        "aux_hidden_state_layer_ids": list(spec.feature_layers),
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": spec.target_hidden_size if is_wide else None,
        "tie_word_embeddings": False,
        "transformer_layer_config": _sizes(spec),
        "speculators_config": speculators_section(spec.method, spec.max_depth, *of_verifier),
    }
    if spec.method == "dspark":
        config |= {
            "markov_rank": spec.markov_rank,
            "markov_head_type": spec.markov,
            "enable_confidence_head": spec.confidence,
            "confidence_head_with_markov": spec.confidence_with_markov,
        }
    if spec.method == "xpress":
        config |= {"xpress_rank": spec.markov_rank, "xpress_mlp_ratio": spec.refiner_size // spec.markov_rank}
    if spec.method == "dflash2":
        config |= {name: getattr(spec, name) for name in _SELECTOR}
    return config


def _outputs(spec: BlockSpec) -> list[int]:
    """`feature_layers` as outputs of layers, -1 for the embeddings."""
    return [layer - 1 for layer in spec.feature_layers]
