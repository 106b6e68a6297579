"""From a checkpoint folder to an `EagleHead` on the target's device, with an account of every key."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.target import last_device

from ...checkpoints import (
    Checkpoint,
    ConfigValues,
    KeyAccount,
    OpenedHead,
    check_stated_target,
    draft_vocabulary,
    read_checkpoint,
    shared_embeddings,
    shared_output,
)
from ...heads import LoadedHead as HeadOf
from ...heads import build_head, check_head_fits, check_mask_token, fill_head, overridden, warn_of_unclear
from ..head import EagleHead
from ..spec import Conventions, EagleSpec
from .layouts import MASK, canonical_name, describe, unclear


# Fields of `EagleSpec` that conventions replace.
_OVERRIDES = ("feature_layers", "norm_before_residual", "norm_logits", "feed_back_normed", "mask_token_id")

LoadedHead = HeadOf[EagleHead]
"""An EAGLE head ready to draft."""


def load_head(folder: str, target: PreTrainedModel, conventions: Conventions | None = None) -> LoadedHead:
    """Loads the head in `folder` for `target`.

    Raises:
        CheckpointError: unreadable, or not what its layout has.
        TargetMismatchError: made for a target of another width, vocabulary or depth.
    """
    conventions = conventions or Conventions()
    opened = open_head(folder, conventions, target)
    if opened.spec.parallel and opened.spec.mask_token_id is None:
        raise CheckpointError(
            f"{folder} is a P-EAGLE head whose config.json does not name its mask token (SpecForge's do not): give "
            "mask_token_id=..., what its training had; without word of that, the tokenizer's mask token."
        )
    embed_tokens = shared_embeddings(
        opened, target.get_input_embeddings(), conventions.embeddings, trained=opened.spec.parallel
    )
    rows = None if opened.spec.own_output else target.dtype
    lm_head = shared_output(opened, target.get_output_embeddings(), rows)
    return assemble(opened, embed_tokens, lm_head, last_device(target), target.dtype)


def open_head(
    folder: str, conventions: Conventions | None = None, target: PreTrainedModel | None = None
) -> OpenedHead[EagleSpec]:
    """Reads the files of a head; with a target, whether it fits is checked before they are looked at closer.

    Raises: as `load_head`.
    """
    conventions = conventions or Conventions()
    checkpoint = read_checkpoint(folder)
    spec = overridden(describe(checkpoint), conventions, _OVERRIDES)
    warn_of_unclear(folder, unclear(ConfigValues(folder, checkpoint.config), spec), spec, conventions)
    if spec.mask_token_id is not None and not spec.parallel:
        raise ValueError(f"eagle: mask_token_id is for P-EAGLE heads; the head in {folder} is {spec.kind}.")
    if target is not None:
        check_fits(spec, target)
        check_stated_target(folder, checkpoint.config, target)
    canonical = {canonical_name(name): tensor for name, tensor in checkpoint.tensors.items()}
    if MASK in canonical:  # some have one dimension less
        canonical[MASK] = canonical[MASK].reshape(1, 1, -1)
    checkpoint = dataclasses.replace(checkpoint, tensors=canonical)
    keys = KeyAccount(checkpoint, f"{spec.kind}, {spec.dialect}")
    return OpenedHead(spec, checkpoint, keys, draft_vocabulary(spec, checkpoint, keys))


def assemble(
    opened: OpenedHead[EagleSpec],
    embed_tokens: nn.Module | None,
    lm_head: nn.Module | None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedHead:
    """The head, with the given modules of the target or, where they are None, its own.

    Args:
        device, dtype: None keeps what the tensors of the files have.
    Raises:
        CheckpointError: missing, unknown and misshapen tensors.
    """
    spec = opened.spec
    head = build_head(lambda: EagleHead(spec, embed_tokens, lm_head), spec, opened.checkpoint.folder, "EAGLE head")
    _ignore_leftovers(spec, opened.checkpoint, opened.keys)
    return fill_head(head, opened, device, dtype)


def check_fits(spec: EagleSpec, target: PreTrainedModel) -> None:
    """Raises `TargetMismatchError` unless a head of this spec can read `target`'s features and speak its vocabulary."""
    check_sizes(spec, target.config.get_text_config(decoder=True), type(target).__name__)


def check_sizes(spec: EagleSpec, config: Any, name: str) -> None:
    """As `check_fits`, for the config of a text model; `name` is what messages call it."""
    layers = spec.resolved_layers(config.num_hidden_layers)
    check_head_fits(spec, layers, config, "EAGLE head", name)
    if len(layers) != spec.num_features:
        raise TargetMismatchError(
            f"this EAGLE head takes features of {spec.num_features} target layers, but {len(layers)} are named: "
            f"{list(layers)}."
        )
    if spec.mask_token_id is not None:
        check_mask_token(spec.mask_token_id, config.vocab_size, "P-EAGLE head", name)


def _ignore_leftovers(spec: EagleSpec, checkpoint: Checkpoint, keys: KeyAccount) -> None:
    """What files hold beyond the head, each with the reason why it is not needed."""
    for name in checkpoint.tensors:
        if name.startswith("parallel_draft_heads."):
            keys.ignore(name, "ModelOpt's parallel heads are not used")
        elif name.startswith("verifier_"):
            keys.ignore(name, "a copy of the target's")
    if not (spec.norm_logits or spec.feed_back_normed):
        keys.ignore("norm.weight", "norm_output is false: logits come from the state as it is")
    if spec.version == 3 and not spec.norm_embedding:
        keys.ignore("layers.0.input_layernorm.weight", "use_input_layernorm_in_first_layer is false")
