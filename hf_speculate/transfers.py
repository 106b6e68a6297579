"""Copies from the host to a device, without waiting for the work that runs there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


STAGED = frozenset({"cuda"})
"""Types of devices that stage pageable memory before a non-blocking copy returns, so that it may be freed at once.
Others may read it later (MPS does); there, a copy waits."""


def to_device(values: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`values` on a device; a tensor that is there already is returned as it is.

    A plain `.to(device)` of a host tensor, and `torch.tensor(..., device=device)`, wait for everything that was
    launched on a GPU before, so the next launch comes late.

    Args:
        values: a tensor on any device, or numbers.
        dtype: dtype of the result; None takes that of a tensor, and int64 for numbers.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype or torch.long, device="cpu")
    if tensor.device == device and dtype in (None, tensor.dtype):
        return tensor
    is_staged = tensor.device.type == "cpu" and device.type in STAGED
    return tensor.to(device=device, dtype=dtype or tensor.dtype, non_blocking=is_staged)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target, tensors of the same dtype in one launch."""
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]


def copy_to_device(values: Sequence[Any], target: Tensor) -> Tensor:
    """Writes numbers to a tensor that is there already."""
    return target.copy_(
        torch.tensor(values, dtype=target.dtype, device="cpu"), non_blocking=target.device.type in STAGED
    )
