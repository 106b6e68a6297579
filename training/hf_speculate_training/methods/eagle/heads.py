"""EAGLE heads as training begins: fresh ones shaped after the target, and published ones."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hf_speculate.speculator import local_folder
from hf_speculate.target import GenerativeModel, embedding_layer, embedding_rows, last_device, output_layer
from hf_speculate_plugins.checkpoints import vocabulary_output
from hf_speculate_plugins.eagle import EagleHead, EagleSpec, check_fits, load_head

from ...sections import RecipeError
from ..heads import copy_rows, initial_std, initialise, layer_sizes, refuse_added_tokens, target_rows, trainable


_MIN_LAYERS_OF_DEFAULT = 6  # below, hidden states 2, L // 2 and L - 3 are not three different ones in order


@dataclass(frozen=True, kw_only=True)
class EagleShape:
    """The shape of a fresh EAGLE head. None stands for the target's own value.

    Attributes:
        num_layers: decoder layers.
        intermediate_size: intermediate size of the layers.
    """

    num_layers: int = 1
    intermediate_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Eagle3Shape(EagleShape):
    """The shape of a fresh EAGLE-3 head, in addition to the fields of `EagleShape`.

    Attributes:
        feature_layers: hidden states of the target that the head reads, as in `EagleSpec`. None takes 2, L // 2 and
            L - 3, as other engines assume for files that name none, or three spread evenly over fewer than 6 layers.
        own_embeddings: True gives the head embeddings of its own, at first a copy of the target's.
        own_output: False keeps the target's output matrix, or its rows for the draft vocabulary, which are not
            trained; the layout "compact" leaves them out of the files. True trains a copy of these rows.
        draft_vocab_size: number of the most frequent tokens of the training data to draft with; None for the target's
            vocabulary.
        qk_norm: True norms queries and keys, as Qwen3 does. Of the layouts only "speculators" and "compact" have that.
    """

    feature_layers: tuple[int, ...] | None = None
    own_embeddings: bool = False
    own_output: bool = True
    draft_vocab_size: int | None = None
    qk_norm: bool = False


def new_eagle3(
    target: GenerativeModel,
    shape: Eagle3Shape | None = None,
    target_ids: Int[Tensor, " Vd"] | None = None,
    **switches: Any,
) -> EagleHead:
    """A fresh EAGLE-3 head in float32, as wide as the target, on the device of the target's last layer.

    Its output matrix begins as the target's rows, so that it speaks the target's language from the first step. Switches
    are further fields of `EagleSpec` (`norm_before_residual`, `fc_norm`, `windows`, …).

    Raises:
        TargetMismatchError: the target does not have these layers.
    """
    config, shape = target.config.get_text_config(decoder=True), shape or Eagle3Shape()
    layers = shape.feature_layers or _default_layers(config.num_hidden_layers)
    features = {"feature_layers": None if layers is None else tuple(layers), "num_features": len(layers or range(3))}
    draft_vocab_size = config.vocab_size if target_ids is None else len(target_ids)
    fixed = {
        "dialect": "speculators",
        "version": 3,
        "draft_vocab_size": draft_vocab_size,
        "own_output": shape.own_output,
        "qk_norm": shape.qk_norm,
    }
    sizes = layer_sizes(config, shape.num_layers, shape.intermediate_size)
    spec = EagleSpec(**{**sizes, **features, **fixed, **switches})
    check_fits(spec, target)
    embeddings = embedding_layer(target)
    output = None if shape.own_output else output_layer(target)
    if output is not None and target_ids is not None:
        output = vocabulary_output(output, config.hidden_size, target_ids, target.dtype)
    with torch.device("cpu"):
        head = EagleHead(spec, None if shape.own_embeddings else embeddings, output)
    initialise(head, initial_std(config))
    if shape.own_embeddings:
        copy_rows(head.embed_tokens.weight, embedding_rows(embeddings, config.vocab_size))
    if shape.own_output:
        copy_rows(head.lm_head.weight, target_rows(target, target_ids))
    return head.to(last_device(target))


def new_eagle1(target: GenerativeModel, shape: EagleShape | None = None, **switches: Any) -> EagleHead:
    """A fresh EAGLE-1 head, of the target's width and with its embeddings and output matrix.

    Switches are further fields of `EagleSpec` (`qkv_bias`, …).
    """
    config, shape = target.config.get_text_config(decoder=True), shape or EagleShape()
    sizes = layer_sizes(config, shape.num_layers, shape.intermediate_size)
    fixed = {"dialect": "eagle1", "version": 1, "draft_vocab_size": config.vocab_size, "num_features": 1}
    spec = EagleSpec(**{**sizes, **fixed, "norm_logits": False, "fc_bias": True, **switches})
    check_fits(spec, target)
    with torch.device("cpu"):
        head = EagleHead(spec, embedding_layer(target), output_layer(target))
    initialise(head, initial_std(config))
    return head.to(last_device(target))


def warm_eagle(folder: str | os.PathLike, target: GenerativeModel) -> tuple[EagleHead, Int[Tensor, " Vd"] | None]:
    """A published EAGLE head (folder or Hub id) whose training continues, and its draft vocabulary.

    Raises:
        RecipeError: a P-EAGLE head, whose masks these methods do not train; a target with more tokens.
    """
    loaded = load_head(local_folder(os.fspath(folder)), target, packed=False)
    if loaded.head.spec.parallel:
        raise RecipeError("method.start_from: this is a P-EAGLE head, and its masks are not trained here.")
    refuse_added_tokens(loaded.head.spec.vocab_size, target)
    return trainable(loaded.head), loaded.target_ids


def _default_layers(num_layers: int) -> tuple[int, ...] | None:
    if num_layers >= _MIN_LAYERS_OF_DEFAULT:
        return None
    return tuple(torch.linspace(1, num_layers, 3, dtype=torch.float32, device="cpu").round().int().tolist())
