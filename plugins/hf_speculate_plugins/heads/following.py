"""Heads follow their target to another dtype or device: `model.to(...)` moves the target alone.

A head is copied, not moved: requests that run keep the one that they began with.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from hf_speculate.errors import TargetMismatchError
from hf_speculate.target import GenerativeModel, last_device

from .head import Head, LoadedHead


Module = TypeVar("Module", bound=nn.Module)


def following(loaded: LoadedHead[Head], target: GenerativeModel) -> LoadedHead[Head]:
    """The head in the dtype and on the device of `target`: the same one, or a copy where the target has changed.

    Raises:
        TargetMismatchError: the head cannot follow. Nothing has changed then.
    """
    head, device = loaded.head, last_device(target)
    if is_placed(head, target.dtype, device):
        return loaded
    check_follows(loaded, target)
    made = {name: module for name, module in head.shared.items() if module is not None and _is_made(head, name)}
    kept = [module for name, module in head.shared.items() if module is not None and name not in made]
    moved = placed_copy(head, target.dtype, device, {id(module): module for module in kept})
    moved._quantized = None
    moved.shared |= {name: placed_copy(module, target.dtype, device) for name, module in made.items()}
    ids = loaded.target_ids
    return replace(loaded, head=moved, target_ids=None if ids is None else ids.to(device))


def check_follows(loaded: LoadedHead[Any], target: GenerativeModel) -> None:
    """Raises `TargetMismatchError` if the head is of another dtype, or on another device, than `target`, and cannot
    follow: its matrices are packed, or it uses modules of another model."""
    head, device = loaded.head, last_device(target)
    if is_placed(head, target.dtype, device):
        return
    own = {id(module) for module in target.modules()}
    shared = {name: module for name, module in head.shared.items() if module is not None}
    strangers = [name for name, module in shared.items() if not _is_made(head, name) and id(module) not in own]
    made = [module for name, module in shared.items() if _is_made(head, name)]
    is_packed = not all(weight.is_floating_point() for module in (head, *made) for weight in module.parameters())
    if strangers or is_packed:
        why = f"it uses the {strangers[0]} of another model" if strangers else "its matrices are packed"
        raise TargetMismatchError(
            f"this {head.spec.kind} head was loaded for a target in {head.dtype} on {head.device}, the target is now "
            f"in {target.dtype} on {device}, and {why}: load the head again with target= this model."
        )


def is_placed(head: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a head computes in a dtype on a device. A device without a number is any of its type."""
    is_same = head.device.type == device.type and (device.index is None or head.device.index in (None, device.index))
    return is_same and head.dtype == dtype


def placed_copy(
    module: Module, dtype: torch.dtype, device: torch.device, kept: Mapping[int, nn.Module] | None = None
) -> Module:
    """A copy of a module with its parameters in a dtype, all on a device. Buffers, such as frequencies of RoPE, keep
    their dtype; 8-bit forms of layers are not copied (`SharingHead.quantize_for_drafting`).

    Args:
        kept: modules that the copy refers to as well, by their `id`.
    """
    memo: dict[int, Any] = dict(kept or {})
    for parameter in module.parameters():
        placed = parameter.detach().to(device=device, dtype=dtype)
        memo[id(parameter)] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
    memo |= {id(buffer): buffer.to(device=device, copy=True) for buffer in module.buffers()}
    copied = copy.deepcopy(module, memo).to(device=device)
    for part in copied.modules():
        vars(part).pop("forward", None)
    return copied


def _is_made(head: Any, name: str) -> bool:
    """Whether a shared module holds a copy of rows of the target's matrix, and so is not a module of the target."""
    return name == "lm_head" and head.spec.draft_vocab_size != head.spec.vocab_size
