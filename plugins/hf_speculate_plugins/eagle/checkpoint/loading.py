"""From a checkpoint folder to an `EagleHead` on the target's device, with an account of every key."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.errors import TargetMismatchError
from hf_speculate.target import last_device

from ...checkpoints import (
    Checkpoint,
    KeyAccount,
    LoadReport,
    OpenedHead,
    check_stated_target,
    draft_vocabulary,
    read_checkpoint,
    shared_embeddings,
    shared_output,
)
from ..head import EagleHead
from ..spec import Conventions, EagleSpec
from .building import build_head
from .layouts import canonical_name, describe


@dataclass(frozen=True)
class LoadedHead:
    """A head ready to draft.

    Attributes:
        head: on the device of the target's last layer, in the target's dtype.
        target_ids: int64 [Vd], target id of each draft id; None where they are the same.
        report: what became of every key of the checkpoint.
    """

    head: EagleHead
    target_ids: Tensor | None
    report: LoadReport

    @property
    def spec(self) -> EagleSpec:
        return self.head.spec


def load_head(folder: str, target: PreTrainedModel, conventions: Conventions | None = None) -> LoadedHead:
    """Loads the head in `folder` for `target`.

    Raises:
        CheckpointError: unreadable, or not what its layout has.
        TargetMismatchError: made for a target of another width, vocabulary or depth.
    """
    conventions = conventions or Conventions()
    opened = open_head(folder, conventions, target)
    embed_tokens = shared_embeddings(opened, target.get_input_embeddings(), conventions.embeddings)
    lm_head = shared_output(opened, target.get_output_embeddings())
    return assemble(opened, embed_tokens, lm_head, last_device(target), target.dtype)


def open_head(
    folder: str, conventions: Conventions | None = None, target: PreTrainedModel | None = None
) -> OpenedHead[EagleSpec]:
    """Reads the files of a head; with a target, whether it fits is checked before they are looked at closer.

    Raises: as `load_head`.
    """
    checkpoint = read_checkpoint(folder)
    spec = _overridden(describe(checkpoint), conventions or Conventions())
    if target is not None:
        check_fits(spec, target)
        check_stated_target(folder, checkpoint.config, target)
    canonical = {canonical_name(name): tensor for name, tensor in checkpoint.tensors.items()}
    checkpoint = dataclasses.replace(checkpoint, tensors=canonical)
    keys = KeyAccount(checkpoint, f"EAGLE-{spec.version}, {spec.dialect}")
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
    spec, keys = opened.spec, opened.keys
    head = build_head(spec, opened.checkpoint.folder, embed_tokens, lm_head)
    _ignore_leftovers(spec, opened.checkpoint, keys)
    weights = {name: keys.take(name, parameter.shape) for name, parameter in head.named_parameters()}
    report = keys.finish()
    # A copy: what was read may be mapped from a file that somebody rewrites later.
    placed = {name: weight.to(device=device, dtype=dtype, copy=True) for name, weight in weights.items()}
    head.load_state_dict(placed, strict=True, assign=True)
    head.rotary.to(device)
    head.requires_grad_(False).eval()
    ids = opened.target_ids
    return LoadedHead(head, None if ids is None else ids.to(device), report)


def check_fits(spec: EagleSpec, target: PreTrainedModel) -> None:
    """Raises `TargetMismatchError` unless a head of this spec can read `target`'s features and speak its vocabulary."""
    check_sizes(spec, target.config.get_text_config(decoder=True), type(target).__name__)


def check_sizes(spec: EagleSpec, config: Any, name: str) -> None:
    """As `check_fits`, for the config of a text model; `name` is what messages call it."""
    for what, ours, theirs in (
        ("hidden size", spec.target_hidden_size, config.hidden_size),
        ("vocabulary", spec.vocab_size, config.vocab_size),
    ):
        if ours != theirs:
            raise TargetMismatchError(
                f"this EAGLE head was made for a target of {what} {ours}, but {name} has {theirs}."
            )
    layers, depth = spec.resolved_layers(config.num_hidden_layers), config.num_hidden_layers
    if len(layers) != spec.num_features:
        raise TargetMismatchError(
            f"this EAGLE head takes features of {spec.num_features} target layers, but {len(layers)} are named: "
            f"{list(layers)}."
        )
    if min(layers) < 0 or max(layers) > depth:
        raise TargetMismatchError(
            f"this EAGLE head reads the target's hidden states {list(layers)}, but {name} has "
            f"{depth} layers, that is hidden states 0 to {depth}."
        )


def _overridden(spec: EagleSpec, conventions: Conventions) -> EagleSpec:
    changes = {
        name: value
        for name in ("feature_layers", "norm_before_residual", "norm_logits", "feed_back_normed")
        if (value := getattr(conventions, name)) is not None
    }
    if conventions.rope_theta is not None:
        changes["rope"] = {**spec.rope, "rope_theta": float(conventions.rope_theta)}
    return dataclasses.replace(spec, **changes)


def _ignore_leftovers(spec: EagleSpec, checkpoint: Checkpoint, keys: KeyAccount) -> None:
    """What files hold beyond the head, each with the reason why it is not needed."""
    for name in checkpoint.tensors:
        if name.endswith("rotary_emb.inv_freq"):
            keys.ignore(name, "recomputed from the config")
        elif name.startswith("parallel_draft_heads."):
            keys.ignore(name, "ModelOpt's parallel heads are not used")
        elif name.startswith("verifier_"):
            keys.ignore(name, "a copy of the target's")
    if not (spec.norm_logits or spec.feed_back_normed):
        keys.ignore("norm.weight", "norm_output is false: logits come from the state as it is")
    if spec.version == 3 and not spec.norm_embedding:
        keys.ignore("layers.0.input_layernorm.weight", "use_input_layernorm_in_first_layer is false")
