"""EAGLE heads as training begins: fresh ones shaped after the target, and published ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.errors import TargetMismatchError
from hf_speculate.hub import local_folder
from hf_speculate.scoring import embedding_rows, last_device
from hf_speculate_plugins.checkpoints import vocabulary_output
from hf_speculate_plugins.eagle import EagleHead, EagleSpec, check_fits, load_head

from ...sections import RecipeError
from ..heads import copy_rows, initialise, target_rows, trainable


_MIN_LAYERS_OF_DEFAULT = 6  # below, hidden states 2, L // 2 and L - 3 are not three different ones in order


@dataclass(frozen=True, kw_only=True)
class EagleShape:
    """The shape of a fresh EAGLE head: fields of `EagleSpec`. None stands for the value of target or method.

    Attributes:
        num_layers: decoder layers.
        hidden_act, rms_norm_eps, rope, max_position_embeddings: settings of every layer; None for the target's.
        intermediate_size: intermediate size; None keeps the target's ratio to the hidden size.
        head_dim: width of every attention head.
        fc_bias, qkv_bias, o_bias, mlp_bias, qk_norm, norm_before_residual, norm_embedding, norm_logits,
            feed_back_normed: switches of `EagleSpec`.
        windows: length of each layer's sliding attention window, None for full attention.
    """

    num_layers: int = 1
    intermediate_size: int | None = None
    head_dim: int | None = None
    hidden_act: str | None = None
    rms_norm_eps: float | None = None
    rope: dict[str, Any] | None = None
    max_position_embeddings: int | None = None
    fc_bias: bool | None = None
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool | None = None
    norm_before_residual: bool | None = None
    norm_embedding: bool | None = None
    norm_logits: bool | None = None
    feed_back_normed: bool | None = None
    windows: tuple[int | None, ...] | None = None

    def given(self, *without: str) -> dict[str, Any]:
        """The fields that are not None, for `new_eagle3` and `new_eagle1`."""
        return {name: value for name, value in vars(self).items() if value is not None and name not in without}


@dataclass(frozen=True, kw_only=True)
class Eagle3Shape(EagleShape):
    """The shape of a fresh EAGLE-3 head.

    Attributes:
        hidden_size: width Hd; None for the target's. A wider or narrower head has embeddings of its own.
        num_heads, num_kv_heads: numbers of heads; None for as many as fit `hidden_size` with the target's head size
            and grouping.
        feature_layers: hidden states of the target that the head reads, as in `EagleSpec`. None takes 2, L // 2 and
            L - 3, as other engines assume for files that do not say, or three spread evenly over fewer than 6 layers.
        own_embeddings: True gives the head embeddings of its own, at first a copy of the target's; None only if it must
            have them.
        own_output: False keeps the target's output matrix, or its rows for the draft vocabulary, which are not
            trained; the layout "compact" leaves them out of the files. Otherwise the head trains a copy of these rows.
        draft_vocab_size: number of the most frequent tokens of the training data to draft with; None for the target's
            vocabulary.
        norm_before_fc, fc_norm: switches of `EagleSpec`.
    """

    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    feature_layers: tuple[int, ...] | None = None
    own_embeddings: bool | None = None
    own_output: bool | None = None
    draft_vocab_size: int | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None


def new_eagle3(
    target: PreTrainedModel,
    target_ids: Int[Tensor, " Vd"] | None = None,
    *,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    feature_layers: Sequence[int] | None = None,
    own_embeddings: bool | None = None,
    own_output: bool = True,
    **switches: Any,
) -> EagleHead:
    """A fresh EAGLE-3 head in float32, on the device of the target's last layer.

    Its output matrix begins as the target's rows, so that it speaks the target's language from the first step.

    Args:
        target: the target.
        target_ids: tokens of the draft vocabulary (`draft_vocabulary`), ascending; None for the whole vocabulary.
        hidden_size, …, own_output: fields of `Eagle3Shape`.
        switches: further fields of `EagleSpec` (`num_layers`, `norm_before_residual`, `fc_norm`, `windows`, …).

    Raises:
        TargetMismatchError: the target does not have these layers, or the size cannot be divided into heads.
    """
    config = target.config.get_text_config(decoder=True)
    width = hidden_size or config.hidden_size
    if own_embeddings is False and width != config.hidden_size:
        raise TargetMismatchError(
            f"an EAGLE-3 head of width {width} cannot use the target's embeddings of width {config.hidden_size}; "
            "leave own_embeddings out."
        )
    layers = feature_layers or _default_layers(config.num_hidden_layers)
    sizes = _sizes(config, width, intermediate_size, num_heads, num_kv_heads, switches.get("num_layers", 1))
    features = {"feature_layers": None if layers is None else tuple(layers), "num_features": len(layers or range(3))}
    draft_vocab_size = config.vocab_size if target_ids is None else len(target_ids)
    if not own_output and width != config.hidden_size:
        raise TargetMismatchError(
            f"an EAGLE-3 head of width {width} cannot have rows of the target's output matrix, of width "
            f"{config.hidden_size}, as its own; leave own_output out."
        )
    fixed = {"dialect": "speculators", "version": 3, "draft_vocab_size": draft_vocab_size, "own_output": own_output}
    spec = EagleSpec(**{**sizes, **features, **fixed, **switches})
    check_fits(spec, target)
    shares_embeddings = not (own_embeddings or width != config.hidden_size)
    output: Any = None if own_output else target.get_output_embeddings()
    if output is not None and target_ids is not None:
        output = vocabulary_output(output, width, target_ids, target.dtype)
    with torch.device("cpu"):
        head = EagleHead(spec, target.get_input_embeddings() if shares_embeddings else None, output)
    initialise(head, config.initializer_range)
    if not shares_embeddings:
        copy_rows(head.embed_tokens.weight, embedding_rows(target.get_input_embeddings(), config.vocab_size))
    if own_output:
        copy_rows(head.lm_head.weight, target_rows(target, target_ids))
    return head.to(last_device(target))


def new_eagle1(target: PreTrainedModel, *, num_layers: int = 1, **switches: Any) -> EagleHead:
    """A fresh EAGLE-1 head, of the target's width and with its embeddings and output matrix.

    Args:
        target: the target.
        num_layers: decoder layers.
        switches: further fields of `EagleSpec` (`intermediate_size`, `fc_bias`, `qkv_bias`, …).
    """
    config = target.config.get_text_config(decoder=True)
    sizes = _sizes(config, config.hidden_size, None, None, None, num_layers)
    fixed = {"dialect": "eagle1", "version": 1, "draft_vocab_size": config.vocab_size, "num_features": 1}
    spec = EagleSpec(**{**sizes, **fixed, "norm_logits": False, "fc_bias": True, **switches})
    check_fits(spec, target)
    with torch.device("cpu"):
        head = EagleHead(spec, target.get_input_embeddings(), target.get_output_embeddings())
    initialise(head, config.initializer_range)
    return head.to(last_device(target))


def warm_eagle(folder: str | os.PathLike, target: PreTrainedModel) -> tuple[EagleHead, Int[Tensor, " Vd"] | None]:
    """A published EAGLE head (folder or Hub id) whose training goes on, and its draft vocabulary.

    Raises:
        RecipeError: a P-EAGLE head, whose masks these methods do not train.
    """
    loaded = load_head(local_folder(os.fspath(folder)), target)
    if loaded.head.spec.parallel:
        raise RecipeError("method.start_from: this is a P-EAGLE head, and its masks are not trained here.")
    return trainable(loaded.head), loaded.target_ids


def _default_layers(num_layers: int) -> tuple[int, ...] | None:
    if num_layers >= _MIN_LAYERS_OF_DEFAULT:
        return None
    return tuple(torch.linspace(1, num_layers, 3).round().int().tolist())


def _sizes(
    config: Any,
    width: int,
    intermediate_size: int | None,
    num_heads: int | None,
    num_kv_heads: int | None,
    num_layers: int,
) -> dict[str, Any]:
    """Fields of an `EagleSpec`, from the target's config unless another value is given."""
    return {
        "hidden_size": width,
        "target_hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_layers": num_layers,
        "intermediate_size": intermediate_size or _scaled(config.intermediate_size, width, config.hidden_size),
        **_head_sizes(config, width, num_heads, num_kv_heads),
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope": dict(config.rope_parameters),
        "max_position_embeddings": config.max_position_embeddings,
        "windows": (None,) * num_layers,
    }


def _scaled(size: int, width: int, target_width: int) -> int:
    """A target's `size`, scaled to the `width` of a head, a multiple of 16."""
    return size if width == target_width else max(round(size * width / target_width / 16), 1) * 16


def _head_sizes(config: Any, width: int, num_heads: int | None, num_kv_heads: int | None) -> dict[str, int]:
    if num_heads is None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = config.num_attention_heads if width == config.hidden_size else max(width // head_dim, 1)
    else:
        heads, head_dim = num_heads, width // num_heads
    groups = config.num_attention_heads // config.num_key_value_heads
    kv_heads = num_kv_heads or (heads // groups if heads % groups == 0 else heads)
    if head_dim < 2 or head_dim % 2 or heads % kv_heads:
        raise TargetMismatchError(
            f"{heads} attention heads over {kv_heads} key heads of size {head_dim} do not make an EAGLE-3 head of "
            f"width {width}: heads must have an even size, and be a multiple of the key heads."
        )
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
