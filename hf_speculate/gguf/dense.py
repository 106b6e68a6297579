"""Dense bfloat16 matrices on a CPU that has the kernel already: few rows at the pace of memory.

PyTorch multiplies one row with half of that pace, and a drafter's head is nothing but such products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import native


# Twice as fast as PyTorch for one row (AVX512_BF16, matrices of 1 to 8 MB), even with it at about this many.
_MOST_ROWS = 16


def quicken(module: nn.Module) -> int:
    """Lets the kernel compute the linear layers of a module where few rows are asked for; how many they are.

    Products are those of PyTorch to the rounding of bfloat16, so this is for what drafts. Nothing is done where the CPU
    cannot multiply bfloat16.
    """
    if native.native_problem() or not native.library().bf16:
        return 0
    layers = [
        each for each in module.modules() if type(each) is nn.Linear and each.in_features % native.TILE_COLUMNS == 0
    ]
    for layer in layers:
        layer.forward = DenseForward(layer)
    return len(layers)


class DenseForward:
    """The `forward` of one linear layer, which stays what it is for whoever reads, writes or trains it."""

    def __init__(self, layer: Any):
        self._layer = layer

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        if torch.compiler.is_compiling() or not _serves(input, weight, bias):
            return functional.linear(input, weight, bias)
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        products = rows.new_empty(rows.shape[0], weight.shape[0])
        native.library().multiply_dense(
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            *reversed(weight.shape),
            rows.data_ptr(),
            rows.shape[0],
            products.data_ptr(),
            torch.get_num_threads(),
        )
        return products.view(*input.shape[:-1], weight.shape[0])


def _serves(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        inputs.dtype is torch.bfloat16
        and weight.dtype is torch.bfloat16
        and inputs.is_cpu
        and weight.is_cpu
        and weight.is_contiguous()
        and 0 < inputs.numel() <= _MOST_ROWS * weight.shape[1]
        and (bias is None or bias.dtype is torch.bfloat16)
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad))
        and type(inputs) is Tensor
    )
