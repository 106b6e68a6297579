"""Addresses for the kernel. Every one is checked first: the kernel trusts dtype, size and layout of what it is given.

A tensor that is not what the kernel takes it for raises an error here. Without the check the kernel would read or write
beyond its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_speculate.errors import SpeculateError


class WrongBufferError(SpeculateError):
    """A tensor is not what the kernel would take it for. Nothing was computed."""


def address_of(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """The address of a contiguous tensor on the CPU with just this dtype and shape; raises `WrongBufferError`."""
    if tensor.dtype is dtype and tensor.shape == shape and tensor.is_contiguous() and tensor.is_cpu:
        return tensor.data_ptr()
    raise WrongBufferError(_mismatch(tensor, dtype, shape, "contiguous"))


def address_of_strided(
    tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], inner: tuple[int, ...] = (1,)
) -> int:
    """The same for a tensor whose first strides are told to the kernel; `inner` are the strides that it assumes."""
    is_alike = tensor.dtype is dtype and tensor.shape == shape and tensor.is_cpu
    if is_alike and tensor.stride()[len(shape) - len(inner) :] == inner:
        return tensor.data_ptr()
    raise WrongBufferError(_mismatch(tensor, dtype, shape, f"with inner strides {inner}"))


def address_of_table(tensor: Tensor, dtype: torch.dtype, least_rows: int, width: int) -> int:
    """The address of a contiguous matrix on the CPU, of this dtype and width, with `least_rows` rows or more."""
    if len(tensor) < least_rows:
        raise WrongBufferError(_mismatch(tensor, dtype, (least_rows, width), "contiguous, or with more rows"))
    return address_of(tensor, dtype, (len(tensor), width))


def places_of(tensors: Sequence[Tensor]) -> list[int]:
    """The present addresses of tensors, to find out later whether they were moved. They must not reach the kernel."""
    return [tensor.data_ptr() for tensor in tensors]


def check_range(what: str, value: int, least: int, most: int) -> None:
    """Raises `WrongBufferError` unless a number is from `least` to `most`."""
    if not least <= value <= most:
        raise WrongBufferError(f"{what} must be from {least} to {most}, got {value}.")


def _mismatch(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> str:
    name, given = str(dtype).removeprefix("torch."), str(tensor.dtype).removeprefix("torch.")
    return (
        f"the kernel for CPUs takes {name} {list(shape)} here, {layout}; it was given {given} {list(tensor.shape)} "
        f"with strides {list(tensor.stride())} on {tensor.device}. Nothing was computed."
    )
