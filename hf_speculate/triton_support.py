"""Support of Triton kernels: whether they run on this machine, and a check of their operands."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .errors import first_line
from .messages import get_logger


logger = get_logger(__name__)

tl: Any = None  # triton.language, once a kernel is wanted: importing it takes a second


def has_triton() -> bool:
    """Whether Triton is installed, and its kernels run here: on a GPU, or interpreted."""
    if importlib.util.find_spec("triton") is None:
        return False
    return is_interpreting() or (torch.cuda.is_available() and _builds(torch.cuda.current_device()))


@cache
def _builds(device_index: int) -> bool:
    """Whether a kernel can be built and launched: Triton needs a C compiler, which small images lack."""
    try:
        probe(torch.device("cuda", device_index))
    except Exception as error:  # of Triton, of a compiler, of the driver
        where = logger.isEnabledFor(logging.DEBUG)
        logger.warning(f"forwards run without kernels of Triton: {first_line(error)}", exc_info=where)
        return False
    return True


def probe(device: torch.device) -> Tensor:
    """The result of a kernel that writes the numbers from 0 to 15; int32 [16] on `device`."""
    global tl
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
    outputs = torch.empty(16, dtype=torch.int32, device=device)
    with torch.cuda.device_of(outputs):  # Triton launches on the current device
        triton.jit(_count)[(1,)](outputs, BLOCK=16)
    return outputs


def _count(outputs, BLOCK: tl.constexpr):  # type: ignore
    places = tl.arange(0, BLOCK)
    tl.store(outputs + places, places)


def is_interpreting() -> bool:
    """Whether Triton's interpreter runs kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_operands(
    device: torch.device, *operands: tuple[Tensor, tuple[int, ...], tuple[torch.dtype, ...] | None]
) -> None:
    """Raises ValueError for a tensor that a kernel would read or write beyond its end.

    Args:
        operands: each tensor with the shape that the kernel takes it for, and the dtypes that it may have (None: any).
    """
    for tensor, shape, dtypes in operands:
        if tensor.device != device or tensor.shape != shape or (dtypes is not None and tensor.dtype not in dtypes):
            raise ValueError(
                f"A Triton kernel takes {list(shape)} of {dtypes or 'any dtype'} on {device} here, not "
                f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}."
            )


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << max(size - 1, 0).bit_length()
