"""From a checkpoint folder to a `BlockHead` on the target's device, with an account of every key."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_speculate.errors import CheckpointError
from hf_speculate.target import last_device

from ...checkpoints import (
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
from ..head import BlockHead
from ..options import Conventions
from ..spec import BlockSpec
from .layouts import describe, unclear


LoadedHead = HeadOf[BlockHead]
"""A one-pass head ready to draft."""


def load_head(folder: str, target: PreTrainedModel, conventions: Conventions | None = None) -> LoadedHead:
    """Loads the head in `folder` for `target`.

    Raises:
        CheckpointError: unreadable, or not what its layout has.
        TargetMismatchError: made for a target of another width, vocabulary or depth.
    """
    opened = open_head(folder, conventions, target)
    embed_tokens = shared_embeddings(opened, target.get_input_embeddings())
    lm_head = shared_output(opened, target.get_output_embeddings())
    return assemble(opened, embed_tokens, lm_head, last_device(target), target.dtype)


def open_head(
    folder: str, conventions: Conventions | None = None, target: PreTrainedModel | None = None
) -> OpenedHead[BlockSpec]:
    """Reads the files of a head; with a target, whether it fits is checked before they are looked at closer.

    Raises: as `load_head`.
    """
    conventions = conventions or Conventions()
    checkpoint = read_checkpoint(folder)
    spec = _overridden(describe(checkpoint, conventions.mask_token_id), conventions)
    warn_of_unclear(folder, unclear(ConfigValues(folder, checkpoint.config), spec), spec, conventions)
    if target is not None:
        check_fits(spec, target)
        check_stated_target(folder, checkpoint.config, target)
    keys = KeyAccount(checkpoint, f"{spec.method}, {spec.dialect}")
    return OpenedHead(spec, checkpoint, keys, draft_vocabulary(spec, checkpoint, keys))


def assemble(
    opened: OpenedHead[BlockSpec],
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
    head = build_head(lambda: BlockHead(spec, embed_tokens, lm_head), spec, opened.checkpoint.folder, "one-pass head")
    return fill_head(head, opened, device, dtype)


def check_fits(spec: BlockSpec, target: PreTrainedModel) -> None:
    """Raises `TargetMismatchError` unless a head of this spec can read `target`'s features and speak its vocabulary."""
    check_sizes(spec, target.config.get_text_config(decoder=True), type(target).__name__)


def check_sizes(spec: BlockSpec, config: Any, name: str) -> None:
    """As `check_fits`, for the config of a text model; `name` is what messages call it."""
    check_head_fits(spec, spec.feature_layers, config, f"{spec.method} head", name)
    check_mask_token(spec.mask_token_id, config.vocab_size, f"{spec.method} head", name)


def _overridden(spec: BlockSpec, conventions: Conventions) -> BlockSpec:
    causal = spec.causal if conventions.causal is None else (conventions.causal,) * spec.num_layers
    changed = overridden(spec, conventions, ("feature_layers", "mask_token_id", "first_slot"), causal=causal)
    if changed.num_features != spec.num_features:
        raise CheckpointError(
            f"this head takes {spec.num_features} features, feature_layers names {changed.num_features}."
        )
    return changed
