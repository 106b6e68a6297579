"""Writing a one-pass head in a published layout, so that the projects of that layout load it.

A layout that cannot say what a head computes is refused: a file that others read differently would draft badly and
never fail. SpecForge's layout is read and not written: its own inference reads the slots of DSpark heads one place off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from hf_speculate.errors import CheckpointError
from hf_speculate.target import embedding_rows, output_rows

from ...checkpoints import speculators_section, stated_sizes, vocabulary_tensors, write_checkpoint
from ..head import BlockHead
from ..spec import BlockSpec


LayoutName = Literal["zlab", "deepspec", "speculators"]

# Who reads a layout -> the layout.
_READERS = {"vllm": "speculators", "dflash": "zlab"}

# What a layout's readers can not be told, as (name for people, does the spec need it).
_Limit = tuple[str, Callable[[BlockSpec], bool]]
_COMMON: tuple[_Limit, ...] = (
    ("projections with biases", lambda spec: spec.attention_bias or spec.mlp_bias),
    ("layers without norms of queries and keys", lambda spec: not spec.qk_norm),
    ("windows of different lengths", lambda spec: len({window for window in spec.windows if window}) > 1),
    ("causality that is not that of its windows", lambda spec: len(_causal_kinds(spec)) > 1),
)
_FULL_VOCABULARY: _Limit = ("a draft vocabulary of its own", lambda spec: spec.draft_vocab_size != spec.vocab_size)
_LOGITS: _Limit = (
    "changed logits or embeddings",
    lambda spec: (spec.embedding_scale, spec.output_multiplier, spec.softcap) != (1, 1, None),
)
_LIMITS: dict[str, tuple[_Limit, ...]] = {
    "zlab": (
        *_COMMON,
        _FULL_VOCABULARY,
        ("a Markov or confidence head", lambda spec: spec.markov is not None or spec.confidence),
        ("slots that propose the token behind their own place", lambda spec: spec.first_slot == 0),
        ("windows counted from the anchor", lambda spec: spec.window_from_anchor and any(spec.windows)),
    ),
    "deepspec": (
        *_COMMON,
        _FULL_VOCABULARY,
        _LOGITS,
        ("convolutions and a selector", lambda spec: spec.selector_rank > 0),
        ("slots that propose the token at their own place", lambda spec: spec.first_slot == 1),
        ("windows", lambda spec: any(spec.windows)),
        ("causal layers", lambda spec: any(spec.causal)),
        (
            "features of another width than its own",
            lambda s: s.adapts_features or s.target_hidden_size != s.hidden_size,
        ),
    ),
    "speculators": (
        *_COMMON,
        _LOGITS,
        ("windows counted from each slot", lambda spec: not spec.window_from_anchor and any(spec.windows)),
        ("causal layers without windows", lambda s: any(c and not w for c, w in zip(s.causal, s.windows, strict=True))),
        ("an adapter of its features", lambda spec: spec.adapts_features),
    ),
}


def default_layout(spec: BlockSpec) -> str:
    """What a head is written as unless somebody says otherwise: its own layout, or the first that can say it."""
    layouts = sorted(("speculators", "deepspec", "zlab"), key=lambda layout: layout != spec.dialect)  # stable
    return next((layout for layout in layouts if not _problems(layout, spec)), layouts[0])


def check_layout(layout: str, spec: BlockSpec) -> str:
    """The layout by its own name.

    Raises:
        CheckpointError: files of `layout` cannot say what a head of this spec computes.
    """
    layout = _READERS.get(layout, layout)
    if layout not in _LIMITS:
        readers = ", ".join(f"{reader!r} for {name!r}" for reader, name in _READERS.items())
        raise CheckpointError(
            f"block: unknown layout {layout!r}; known are {', '.join(map(repr, _LIMITS))} ({readers})."
        )
    if problems := _problems(layout, spec):
        raise CheckpointError(f"the {layout} layout cannot express this head: it has {', '.join(problems)}.")
    return layout


def write_head(
    path: str | os.PathLike,
    head: BlockHead,
    target_ids: Tensor | None,
    layout: LayoutName | str,
    *,
    num_target_layers: int | None,
    target_name: str | None = None,
    target_architectures: list[str] | None = None,
) -> None:
    """Writes weights and config.json to the folder `path`, which is made.

    Args:
        num_target_layers: depth of the target; None if unknown.
        target_name, target_architectures: for layouts whose config names the target.
    Raises:
        CheckpointError: the layout cannot express this head; the message says why.
    """
    spec = head.spec
    layout = check_layout(layout, spec)
    if layout == "speculators":
        config = _speculators_config(spec, target_name, target_architectures)
    else:
        config = {**_sizes(spec), **(_zlab_config(spec) if layout == "zlab" else _deepspec_config(spec))}
        if num_target_layers is not None:
            config["num_target_layers"] = num_target_layers
        if target_name is not None:
            config["base_model_name_or_path"] = target_name
    config["dtype"] = str(head.dtype).removeprefix("torch.")
    write_checkpoint(path, "model.safetensors", _tensors(head, target_ids, layout), config)


def _problems(layout: str, spec: BlockSpec) -> list[str]:
    return [name for name, is_needed in _LIMITS[layout] if is_needed(spec)]


def _causal_kinds(spec: BlockSpec) -> set[tuple[bool, bool]]:
    """(has a window, is causal) of layers, without those that every layout has: neither."""
    kinds = {(window is not None, causal) for window, causal in zip(spec.windows, spec.causal, strict=True)}
    return kinds - {(False, False)}


def _tensors(head: BlockHead, target_ids: Tensor | None, layout: str) -> dict[str, Tensor]:
    """Everything that the layout stores: own storage, on the CPU."""
    spec = head.spec
    tensors = dict(head.state_dict())
    if layout == "deepspec":  # which keeps copies of the target's
        for name, rows in _shared_rows(head).items():
            tensors.setdefault(name, rows)
    if target_ids is not None:
        tensors |= vocabulary_tensors(spec, target_ids)
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _shared_rows(head: BlockHead) -> dict[str, Tensor]:
    found = {}
    if (embeddings := head.shared["embed_tokens"]) is not None:
        found["embed_tokens.weight"] = embedding_rows(embeddings, head.spec.vocab_size)
    if (output := head.shared["lm_head"]) is not None:
        found["lm_head.weight"] = output_rows(output, head.spec.hidden_size, head.dtype)
    return found


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
    """As z-lab's own files, and JetSpec's: what is special lies in `dflash_config`."""
    nested: dict[str, Any] = {"mask_token_id": spec.mask_token_id, "target_layer_ids": _outputs(spec)}
    config: dict[str, Any] = {"architectures": ["DFlash2DraftModel" if spec.selector_rank else "DFlashDraftModel"]}
    if spec.target_hidden_size != spec.hidden_size:
        config["target_hidden_size"] = spec.target_hidden_size
    if (False, True) in _causal_kinds(spec):
        nested["causal_head"] = True
    if any(spec.windows):
        config["is_causal"] = (True, True) in _causal_kinds(spec)
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k") if spec.selector_rank else ():
        nested[key] = getattr(spec, key)
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


def _deepspec_config(spec: BlockSpec) -> dict[str, Any]:
    """As DeepSpec's: everything at the top; DFlash heads are DSpark heads of Markov rank 0."""
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


def _speculators_config(
    spec: BlockSpec, target_name: str | None, target_architectures: list[str] | None
) -> dict[str, Any]:
    """As vllm-project/speculators: the layers' config nested and complete, features as `hidden_states` indices."""
    class_name = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}
    is_wide = spec.target_hidden_size != spec.hidden_size
    config: dict[str, Any] = {
        "architectures": [class_name[spec.method]],
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
        "speculators_config": speculators_section(spec.method, spec.max_depth, target_name, target_architectures),
    }
    if spec.method == "dspark":
        config |= {
            "markov_rank": spec.markov_rank,
            "markov_head_type": spec.markov,
            "enable_confidence_head": spec.confidence,
            "confidence_head_with_markov": spec.confidence_with_markov,
        }
    if spec.method == "dflash2":
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        config |= {name: getattr(spec, name) for name in names}
    return config


def _outputs(spec: BlockSpec) -> list[int]:
    """`feature_layers` as outputs of layers, -1 for the embeddings."""
    return [layer - 1 for layer in spec.feature_layers]
