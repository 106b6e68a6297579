"""The ranking of tokens by a head's states: norm, output matrix, noise, highest log-probabilities.

The ctypes structure mirrors `kernel/ranking.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from . import binding
from .layer_parts import matrix_of, quantized, quantizes_activations
from .memory import address_of, check_range
from .quantized_layers import QuantizedForward
from .refusals import MIXED_WEIGHTS, Refused
from .weights import MatrixStructure, WeightsInPlace, fields, fill_matrix, parameters_of, unpacked


# Warpers that the kernel can apply, in the order of `generate`.
_WARPERS: dict[type | None, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


@binding.mirrors("Ranking")
class RankingStructure(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "x", "normed"),
        *fields(ctypes.c_int64, "batch_size", "num_nodes"),
        *fields(ctypes.c_void_p, "norm"),
        *fields(ctypes.c_double, "eps"),
        ("output", MatrixStructure),
        *fields(ctypes.c_double, "temperature", "top_p", "min_p"),
        *fields(ctypes.c_int64, "top_k"),
        *fields(ctypes.c_void_p, "log_noise"),
        *fields(ctypes.c_int64, "num_columns", "most"),
        *fields(ctypes.c_void_p, "log_probs", "columns"),
        *fields(ctypes.c_int64, "is_bf16", "quantize", "threads"),
    ]


@dataclass(frozen=True)
class Sampling:
    """The warpers of a sampled request that the kernel can apply; the defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, warpers: Sequence[Any]) -> Sampling:
        """The options of these warpers. Raises `Refused` if one is unknown, or the order is not that of `generate`."""
        order = [_WARPERS.get(type(warper)) for warper in warpers]
        known = [name for name in order if name is not None]
        if len(known) < len(order) or known != [name for name in _WARPERS.values() if name in known]:
            raise Refused(f"the logits processors {', '.join(type(warper).__name__ for warper in warpers)}")
        if any(getattr(warper, "min_tokens_to_keep", 1) > 1 for warper in warpers):
            raise Refused("sampling that keeps several tokens whatever their probability (beams)")
        return cls(**{name: getattr(warper, name) for name, warper in zip(known, warpers, strict=True)})


class NativeRanking:
    """The computation after the last layer of a head: a norm, if there is one, and an output matrix (`of`)."""

    def __init__(
        self,
        matrix: Any,
        norm: Any,
        eps: float,
        dtype: torch.dtype,
        feeds_back_normed: bool,
        num_columns: int | None,
    ):
        self._weights = WeightsInPlace(_modules(matrix, norm))
        self.feeds_back_normed, self.num_columns = feeds_back_normed, num_columns or matrix.out_features
        check_range("the number of ranked tokens", self.num_columns, 1, matrix.out_features)
        self._fixed = RankingStructure(eps=eps)
        if norm is not None:
            self._fixed.norm = address_of(norm.weight, dtype, (matrix.in_features,))
        self._fixed.is_bf16 = dtype is torch.bfloat16
        self._fixed.quantize = quantizes_activations(matrix) or False
        fill_matrix(self._fixed.output, matrix, dtype)

    @classmethod
    def of(
        cls,
        output: nn.Module,
        norm: Any,
        eps: float,
        dtype: torch.dtype,
        feeds_back_normed: bool = False,
        quantize: bool = False,
        num_columns: int | None = None,
    ) -> NativeRanking:
        """The ranking. Raises `Refused` if the kernel cannot compute it.

        Args:
            feeds_back_normed: whether the next draft step takes normed states.
            quantize: whether to multiply in 8 bits if possible.
            num_columns: number of the matrix's first outputs to rank; None for all.
        """
        matrix: Any = matrix_of(output)
        if matrix is None or quantizes_activations(matrix) is None or matrix.in_features % binding.TILE_COLUMNS:
            raise Refused(f"an output layer of type {type(output).__name__}, or of other sizes or weights")
        if type(vars(matrix).get("forward")) not in (NoneType, QuantizedForward):  # such as accelerate's
            raise Refused("an output layer whose forward was replaced")
        weights = unpacked(parameters_of(_modules(matrix, norm)))
        is_alike = all(weight.is_cpu and weight.dtype is dtype for weight in weights)
        if not is_alike or not matrix.weight.is_cpu:
            raise Refused(MIXED_WEIGHTS)
        in_8_bits = quantized(output) if quantize else None
        return cls(in_8_bits or matrix, norm, eps, dtype, feeds_back_normed, num_columns)

    def is_current(self) -> bool:
        """Whether the weights are unchanged (`WeightsInPlace.are_current`)."""
        return self._weights.are_current()

    def call(self, log_noise: Float[Tensor, "B C"] | None, sampling: Sampling, batch_size: int) -> RankingStructure:
        """A call structure without states.

        Args:
            log_noise: log noise, float32, contiguous, subtracted from the scores; it limits their columns to its own.
                None when greedy.
            sampling: warpers that are applied to the scores first.
        """
        call = RankingStructure.from_buffer_copy(self._fixed)  # a copy, because threads share a head
        call.temperature, call.top_p, call.min_p = sampling.temperature, sampling.top_p, sampling.min_p
        call.num_columns = self.num_columns if log_noise is None else log_noise.shape[-1]
        self.set_noise(call, log_noise, batch_size)
        call.top_k, call.threads = sampling.top_k, torch.get_num_threads()
        return call

    @staticmethod
    def set_noise(call: RankingStructure, log_noise: Float[Tensor, "B C"] | None, batch_size: int) -> None:
        """Sets the log noise of the next level, as wide as that of the first."""
        if log_noise is not None:
            call.log_noise = address_of(log_noise, torch.float32, (batch_size, call.num_columns))


def _modules(matrix: nn.Module, norm: nn.Module | None) -> list[nn.Module]:
    return [matrix] if norm is None else [matrix, norm]
