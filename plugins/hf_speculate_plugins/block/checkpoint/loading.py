"""From a checkpoint folder to a `BlockHead` on the target's device, with an account of every key."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.target import last_device

from ...checkpoints import (
    KeyAccount,
    LoadReport,
    OpenedHead,
    check_stated_target,
    draft_vocabulary,
    read_checkpoint,
    shared_embeddings,
    shared_output,
)
from ...heads import sample_angles
from ..head import BlockHead
from ..options import Conventions
from ..spec import BlockSpec
from .layouts import describe


@dataclass(frozen=True)
class LoadedHead:
    """A head ready to draft.

    Attributes:
        head: on the device of the target's last layer, in the target's dtype.
        target_ids: int64 [Vd], target id of each draft id; None where they are the same.
        report: what became of every key of the checkpoint.
    """

    head: BlockHead
    target_ids: Tensor | None
    report: LoadReport

    @property
    def spec(self) -> BlockSpec:
        return self.head.spec


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
    checkpoint = read_checkpoint(folder)
    spec = _overridden(describe(checkpoint), conventions or Conventions())
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
    head, keys = _built(opened, embed_tokens, lm_head), opened.keys
    for name in opened.checkpoint.tensors:
        if name.endswith("rotary_emb.inv_freq"):
            keys.ignore(name, "recomputed from the config")
    weights = {name: keys.take(name, parameter.shape) for name, parameter in head.named_parameters()}
    report = keys.finish()
    # A copy: what was read may be mapped from a file that somebody rewrites later.
    placed = {name: weight.to(device=device, dtype=dtype, copy=True) for name, weight in weights.items()}
    head.load_state_dict(placed, strict=True, assign=True)
    head.rotary.to(device)
    head.requires_grad_(False).eval()
    ids = opened.target_ids
    return LoadedHead(head, None if ids is None else ids.to(device), report)


def _built(opened: OpenedHead[BlockSpec], embed_tokens: nn.Module | None, lm_head: nn.Module | None) -> BlockHead:
    """The head on the meta device; raises `CheckpointError` for activations and RoPE that do not exist."""
    spec, folder = opened.spec, opened.checkpoint.folder
    try:
        with torch.device("meta"):
            head = BlockHead(spec, embed_tokens, lm_head)
        angles = sample_angles(head.rotary, spec)
    except Exception as error:  # what is wrong with types of RoPE and activations, transformers says in several ways
        raise CheckpointError(
            f"{folder}: config.json makes no one-pass head ({type(error).__name__}: {error}); RoPE is {spec.rope}, the "
            f"activation {spec.hidden_act!r}."
        ) from error
    if not all(part.isfinite().all() and part.shape[-1] == spec.head_dim for part in angles):
        raise CheckpointError(f"{folder}: RoPE with {spec.rope} (config.json) gives no {spec.head_dim} angles.")
    return head


def check_fits(spec: BlockSpec, target: PreTrainedModel) -> None:
    """Raises `TargetMismatchError` unless a head of this spec can read `target`'s features and speak its vocabulary."""
    check_sizes(spec, target.config.get_text_config(decoder=True), type(target).__name__)


def check_sizes(spec: BlockSpec, config: Any, name: str) -> None:
    """As `check_fits`, for the config of a text model; `name` is what messages call it."""
    for what, ours, theirs in (
        ("hidden size", spec.target_hidden_size, config.hidden_size),
        ("vocabulary", spec.vocab_size, config.vocab_size),
    ):
        if ours != theirs:
            raise TargetMismatchError(
                f"this {spec.method} head was made for a target of {what} {ours}, but {name} has {theirs}."
            )
    layers, depth = spec.feature_layers, config.num_hidden_layers
    if min(layers) < 0 or max(layers) > depth:
        raise TargetMismatchError(
            f"this {spec.method} head reads the target's hidden states {list(layers)}, but {name} has {depth} layers, "
            f"that is hidden states 0 to {depth}."
        )
    if spec.mask_token_id >= spec.vocab_size:
        raise TargetMismatchError(
            f"the mask token of this {spec.method} head is {spec.mask_token_id}, but {name} has {config.vocab_size} "
            "tokens."
        )


def _overridden(spec: BlockSpec, conventions: Conventions) -> BlockSpec:
    changes: dict[str, Any] = {
        name: value
        for name in ("feature_layers", "mask_token_id", "first_slot")
        if (value := getattr(conventions, name)) is not None
    }
    if conventions.causal is not None:
        changes["causal"] = (conventions.causal,) * spec.num_layers
    if conventions.rope_theta is not None:
        changes["rope"] = {**spec.rope, "rope_theta": float(conventions.rope_theta)}
    if len(changes.get("feature_layers", spec.feature_layers)) != spec.num_features:
        raise CheckpointError(
            f"this head takes {spec.num_features} features, feature_layers names {len(changes['feature_layers'])}."
        )
    return dataclasses.replace(spec, **changes)
