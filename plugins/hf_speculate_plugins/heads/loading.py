"""From the files of a head, understood, to a head that drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.messages import get_logger

from ..checkpoints import LoadReport, OpenedHead
from .layers import sample_angles
from .sharing import HeadSpec, SharingHead


logger = get_logger(__name__)

Head = TypeVar("Head", bound=SharingHead[Any])


@dataclass(frozen=True)
class LoadedHead(Generic[Head]):
    """A head ready to draft.

    Attributes:
        head: on the device of the target's last layer, in the target's dtype.
        target_ids: int64 [Vd], target id of each draft id; None where they are the same.
        report: what became of every key of the checkpoint.
    """

    head: Head
    target_ids: Tensor | None
    report: LoadReport

    @property
    def spec(self) -> Any:
        """What the head computes."""
        return self.head.spec


def build_head(make: Callable[[], Head], spec: HeadSpec, folder: str, kind: str) -> Head:
    """A head on the meta device.

    Args:
        kind: of head, for messages: "EAGLE head".
    Raises:
        CheckpointError: an unknown activation, or RoPE parameters that give no angles, for short texts or for long.
    """
    try:
        with torch.device("meta"):
            head = make()
        angles = sample_angles(head.rotary, spec)
    except Exception as error:  # what is wrong with types of RoPE and activations, transformers says in several ways
        raise CheckpointError(
            f"{folder}: config.json makes no {kind} ({type(error).__name__}: {error}); RoPE is {spec.rope}, the "
            f"activation {spec.hidden_act!r}."
        ) from error
    if not all(part.isfinite().all() and part.shape[-1] == spec.head_dim for part in angles):
        raise CheckpointError(f"{folder}: RoPE with {spec.rope} (config.json) gives no {spec.head_dim} angles.")
    return head


def fill_head(
    head: Head, opened: OpenedHead[Any], device: torch.device | None = None, dtype: torch.dtype | None = None
) -> LoadedHead[Head]:
    """A head from `build_head` with its weights.

    Args:
        device, dtype: None keeps what the tensors of the files have.
    Raises:
        CheckpointError: missing, unknown and misshapen tensors.
    """
    keys = opened.keys
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


def check_head_fits(spec: HeadSpec, layers: Sequence[int], config: Any, kind: str, name: str) -> None:
    """Raises `TargetMismatchError` unless such a head can read a target's features and speak its vocabulary.

    Args:
        layers: indices into the target's `hidden_states` that it reads.
        config: of the target's text model.
        kind: of head, for messages: "EAGLE head".
        name: what messages call the target.
    """
    for what, ours, theirs in (
        ("hidden size", spec.target_hidden_size, config.hidden_size),
        ("vocabulary", spec.vocab_size, config.vocab_size),
    ):
        if ours != theirs:
            raise TargetMismatchError(f"this {kind} was made for a target of {what} {ours}, but {name} has {theirs}.")
    depth = config.num_hidden_layers
    if min(layers) < 0 or max(layers) > depth:
        raise TargetMismatchError(
            f"this {kind} reads the target's hidden states {list(layers)}, but {name} has {depth} layers, that is "
            f"hidden states 0 to {depth}."
        )


def check_mask_token(token: int, vocab_size: int, kind: str, name: str) -> None:
    """Raises `TargetMismatchError` unless the mask token of a head is one of the target's; names as in
    `check_head_fits`."""
    if not 0 <= token < vocab_size:
        raise TargetMismatchError(f"the mask token of this {kind} is {token}, but {name} has {vocab_size} tokens.")


AnySpec = TypeVar("AnySpec", bound=Any)


def overridden(spec: AnySpec, conventions: Any, names: Sequence[str], **changes: Any) -> AnySpec:
    """`spec` as the caller's conventions have it.

    Args:
        names: of fields of both, which the conventions replace where they are not None; so does `rope_theta`.
        changes: other fields.
    """
    changes |= {name: value for name in names if (value := getattr(conventions, name)) is not None}
    if conventions.rope_theta is not None:
        changes["rope"] = {**spec.rope, "rope_theta": float(conventions.rope_theta)}
    return dataclasses.replace(spec, **changes)


def warn_of_unclear(folder: str, unclear: Mapping[str, str], spec: Any, conventions: Any) -> None:
    """Says once what the files of a head leave open, and which option decides it.

    Args:
        unclear: the open question, by the option of the conventions that answers it.
        spec: as the head is read now.
    """
    for option, question in unclear.items():
        if getattr(conventions, option) is None:
            logger.warning_once(
                f"{folder}: its files do not say {question}. It is read with {option}={getattr(spec, option)!r}; if it "
                f"drafts badly, give {option} yourself (`hf-speculate check` tries the others)."
            )
