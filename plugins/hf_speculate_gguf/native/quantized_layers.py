"""Linear layers that compute in 8 bits when few rows are drafted (`quantized`), and as usual otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .backends import NativeBackend
from .binding import DENSE_KINDS
from .modules import PackedMatrix
from .quantized import QuantizedMatrix
from .weights import WeightsInPlace


# Most rows for which 8 bits are faster than PyTorch: three times up to 8 rows. AMX multiplies more rows of bfloat16
# faster.
_MOST_ROWS = {torch.float32: 64, torch.bfloat16: 16}

# Below this size the call takes longer than it saves.
_LEAST_WEIGHTS = 1 << 17


def quantize_for_drafting(module: nn.Module) -> int:
    """Lets the kernel compute the larger linear layers of a module for few rows. Returns their number.

    Activations are quantised, so this is only for drafting. The layers can still be read, written and trained; each
    gets an 8-bit copy.
    """
    layers: list[Any] = [layer for layer in module.modules() if _is_plain(layer)]
    for layer in layers:
        layer.forward = QuantizedForward(layer)
        layer.forward.matrix()
    return len(layers)


def _is_plain(module: nn.Module | None) -> bool:
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)  # accelerate's, or already quantised
        and module.weight.is_cpu
        and module.weight.dtype in DENSE_KINDS
        and module.weight.numel() >= _LEAST_WEIGHTS
    )


class QuantizedForward:
    """The `forward` of a layer (`nn.Linear` or packed) that drafts."""

    def __init__(self, layer: Any):
        self.layer = layer
        self._matrix: QuantizedMatrix | None = None
        self._weights: WeightsInPlace | None = None

    def __getstate__(self):
        """The state of a copy, which makes its own matrix."""
        return {"layer": self.layer, "_matrix": None, "_weights": None}

    def matrix(self) -> QuantizedMatrix | None:
        """The 8-bit matrix, made again if the weights have changed; None if the kernel cannot use it."""
        if self._weights is None or not self._weights.are_current():
            self._matrix = QuantizedMatrix.of(self.layer)
            self._weights = WeightsInPlace([self.layer], are_copied=True)
        return self._matrix

    def __call__(self, input: Tensor) -> Tensor:
        is_served = not torch.compiler.is_compiling() and _is_small(input) and not _needs_gradient(input, self.layer)
        matrix = self.matrix() if is_served else None
        return type(self.layer).forward(self.layer, input) if matrix is None else matrix(input)


class QuantizedLinear(nn.Module):
    """A layer that belongs to another model and stays unchanged, in the form for a drafter."""

    def __init__(self, layer: Any):
        super().__init__()
        self.forward: Any = QuantizedForward(layer)
        self.forward.matrix()

    @staticmethod
    def suits(layer: nn.Module | None) -> bool:
        """Whether a layer would be faster in this form."""
        return _is_plain(layer) or (isinstance(layer, PackedMatrix) and isinstance(layer.backend, NativeBackend))

    @property
    def layer(self) -> Any:
        """The original layer."""
        return self.forward.layer

    @property
    def weight(self) -> Tensor:
        """The weight of the original layer."""
        return self.layer.weight


def _is_small(inputs: Tensor) -> bool:
    return (
        type(inputs) is Tensor
        and inputs.is_cpu
        and 0 < inputs.numel() <= _MOST_ROWS.get(inputs.dtype, 0) * inputs.shape[-1]
        and not torch.is_autocast_enabled("cpu")
    )


def _needs_gradient(inputs: Tensor, layer: Any) -> bool:
    return torch.is_grad_enabled() and (inputs.requires_grad or layer.weight.requires_grad)
