"""Backends for products with packed matrices: one interface, chosen at load by device and dtype.

Decoding and verification use the same backend: the bits of a row never depend on the number of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from hf_speculate.errors import CheckpointError, UnsupportedRequestError

from .. import gpu
from . import binding, large_pages
from .formats import FORMATS


# Name of the choice to pack nothing and use transformers' own linear layers.
DENSE = "dense"

# Number of weights that `dequantize` has in memory at a time, in float32 and in the model's dtype.
BUFFER_WEIGHTS = 1 << 22


class Backend(ABC):
    """Packs matrices of blocks and multiplies with them. `name` is that of `load_gguf(backend=)` and reports.

    `rows_together` is the number of rows of a matrix in each row of its packed bytes.
    """

    name: str
    rows_together = 1

    @abstractmethod
    def problem(self, device: torch.device, dtype: torch.dtype) -> str:
        """The reason why the backend cannot be used with this device and dtype; "" if it can."""

    @abstractmethod
    def pack(self, matrix: Any, device: torch.device) -> UInt8[Tensor, "rows bytes"]:
        """Packs a matrix of a file (`matrices.Matrix`); raises `CheckpointError` if a scale is not finite."""

    @abstractmethod
    def multiply(self, inputs: Float[Tensor, "M K"], layer: Any) -> Float[Tensor, "M N"]:
        """x @ w.T without bias, for a packed `layer`."""

    def _in_parts(
        self, inputs: Float[Tensor, "M K"], out_features: int, multiply: Callable[[int, int], Tensor]
    ) -> Float[Tensor, "M N"]:
        """Products by a function that dequantises the matrix rows from one number to another and multiplies."""
        step = max(BUFFER_WEIGHTS // inputs.shape[1] // self.rows_together, 1) * self.rows_together
        products = inputs.new_empty(len(inputs), out_features)
        for start in range(0, out_features, step):
            stop = min(start + step, out_features)
            products[:, start:stop] = multiply(start, stop)
        return products


class NativeBackend(Backend):
    """Our own kernel, compiled at first use: it multiplies with the packed integers and sums in float32.

    Weights keep the width that they have in the file. In bfloat16 only inputs and products are rounded.
    """

    name = "native"
    rows_together = binding.TILE_ROWS
    quantizes_activations = False

    def problem(self, device, dtype):
        return _problem_on_cpus(device, dtype) or binding.native_problem()

    def pack(self, matrix, device):
        library, lanes = binding.library(), binding.TILE_ROWS
        tile_bytes = library.tile_bytes(matrix.type, matrix.num_columns)
        tiles = large_pages.zeros(-(-matrix.num_rows // lanes), tile_bytes)
        for start, rows in matrix.chunks(BUFFER_WEIGHTS, lanes):
            if not library.pack(matrix.type, rows, matrix.num_columns, tiles[start // lanes :]):
                raise _not_finite(matrix)
        return tiles

    def multiply(self, inputs, layer):
        if not (inputs.is_cpu and layer.packed.is_cpu):
            raise UnsupportedRequestError(
                "these GGUF weights were packed for the CPU and cannot be moved: load the file with "
                f"load_gguf(..., device={str(inputs.device)!r})."
            )
        return _multiply(inputs, layer.packed, layer.block_type, layer.out_features, self.quantizes_activations)


class QuantizingBackend(NativeBackend):
    """The same kernel with activations quantised to 8 bits in blocks of 32, as llama.cpp does.

    Products of bytes are exact and need far fewer instructions. Results are close to those of `native`
    (docs/quantised-targets.md has the figures).
    """

    name = "native-int8"
    quantizes_activations = True

    @staticmethod
    def is_faster(dtype: torch.dtype) -> bool:
        """Whether this CPU generates faster this way, for a model that rounds to bfloat16 anyway."""
        return dtype is torch.bfloat16 and binding.library().multiplies_bytes


class DequantizeBackend(Backend):
    """Keeps the blocks of the file and dequantises some rows at a time at every call.

    It is as small as the file, works on any device, and is the plain reference of the others. With few rows it is many
    times slower than dense weights.
    """

    name = "dequantize"

    # Matrix libraries sum in another order when there are few rows, so every product has this many rows.
    _ROWS = 16

    def problem(self, device, dtype):
        return ""

    def pack(self, matrix, device):
        weight = torch.empty(matrix.num_rows, matrix.row_bytes, dtype=torch.uint8, device=device)
        for start, rows in matrix.chunks(BUFFER_WEIGHTS):
            if not FORMATS[matrix.type].dequantize(rows).isfinite().all():
                raise _not_finite(matrix)
            weight[start : start + len(rows)] = rows
        return weight

    def multiply(self, inputs, layer):
        num_inputs, block_format = inputs.shape[0], FORMATS[layer.block_type]
        tiles = functional.pad(inputs, (0, 0, 0, -num_inputs % self._ROWS)).split(self._ROWS)

        def multiply(start: int, stop: int) -> Tensor:
            weights = block_format.dequantize(layer.packed[start:stop]).to(inputs.dtype)
            return torch.cat([functional.linear(tile, weights) for tile in tiles])[:num_inputs]

        return self._in_parts(inputs, layer.out_features, multiply)


class TritonBackend(Backend):
    """Triton kernels for NVIDIA GPUs: they multiply with the packed integers and sum in float32.

    Up to 64 rows, the bits of a row depend on nothing but the row. More rows (prompts) are multiplied by torch's
    library with weights that are dequantised for the call, some matrix rows at a time.
    """

    name = "triton"
    rows_together = gpu.TILE_ROWS

    def problem(self, device, dtype):
        return gpu.problem(device, dtype)

    def pack(self, matrix, device):
        num_tiles = -(-matrix.num_rows // gpu.TILE_ROWS)
        num_bytes = gpu.tile_bytes(matrix.type, matrix.num_columns)
        tiles = torch.empty(num_tiles, num_bytes, dtype=torch.uint8, device=device)
        for start, rows in matrix.chunks(BUFFER_WEIGHTS, gpu.TILE_ROWS):
            packed = gpu.pack(rows.to(device), matrix.type)
            if packed is None:
                raise _not_finite(matrix)
            tiles[start // gpu.TILE_ROWS :][: len(packed)] = packed
        return tiles

    def multiply(self, inputs, layer):
        if inputs.device != layer.packed.device or (inputs.is_cpu and gpu.problem(inputs.device, inputs.dtype)):
            raise UnsupportedRequestError(
                f"these GGUF weights were packed for Triton on {str(layer.packed.device)!r}, which does not compute on "
                f"{str(inputs.device)!r}: load the file with load_gguf(..., device={str(inputs.device)!r})."
            )
        if len(inputs) <= gpu.MAX_ROWS:
            multiply = torch.ops.hf_speculate.multiply_tiles if torch.compiler.is_compiling() else gpu.multiply
            return multiply(inputs, layer.packed, layer.block_type, layer.out_features)

        def multiply_dequantized(start: int, stop: int) -> Tensor:
            tiles = layer.packed[start // gpu.TILE_ROWS : -(-stop // gpu.TILE_ROWS)]
            weights = gpu.unpack(tiles, layer.block_type, stop - start, inputs.shape[1])
            return functional.linear(inputs, weights.to(inputs.dtype))

        return self._in_parts(inputs, layer.out_features, multiply_dequantized)


def _not_finite(matrix: Any) -> CheckpointError:
    return CheckpointError(f"{', '.join(matrix.names)} ({matrix.type}): some scales are not finite.")


def _multiply(
    inputs: Float[Tensor, "M K"], tiles: UInt8[Tensor, "T bytes"], block_type: str, out_features: int, quantize: bool
) -> Float[Tensor, "M N"]:
    """`Library.multiply`, which also works while torch.compile traces."""
    if torch.compiler.is_compiling():
        return torch.ops.hf_speculate.multiply_packed(inputs, tiles, block_type, out_features, quantize)
    return binding.library().multiply(inputs, tiles, block_type, out_features, quantize)


@torch.library.custom_op("hf_speculate::multiply_packed", mutates_args=())
def _multiply_packed(inputs: Tensor, tiles: Tensor, block_type: str, out_features: int, quantize: bool) -> Tensor:
    return binding.library().multiply(inputs, tiles, block_type, out_features, quantize)


@_multiply_packed.register_fake
def _(inputs, tiles, block_type, out_features, quantize):
    return inputs.new_empty(inputs.shape[0], out_features)


@torch.library.custom_op("hf_speculate::multiply_tiles", mutates_args=())
def _multiply_tiles(inputs: Tensor, tiles: Tensor, block_type: str, out_features: int) -> Tensor:
    return gpu.multiply(inputs, tiles, block_type, out_features)


@_multiply_tiles.register_fake
def _(inputs, tiles, block_type, out_features):
    return inputs.new_empty(inputs.shape[0], out_features)


def _problem_on_cpus(device: torch.device, dtype: torch.dtype) -> str:
    """The part of `Backend.problem` that all CPU kernels share."""
    if device.type != "cpu":
        return f"it computes on the CPU, not on {device.type!r}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it computes in bfloat16, float16 or float32, not {dtype}"
    return ""


BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (NativeBackend(), QuantizingBackend(), DequantizeBackend(), TritonBackend())
}


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> Backend | None:
    """The backend called `name`; for "auto" the fastest that works. None: weights are dequantised at load.

    Raises `UnsupportedRequestError` if the name is unknown, or the backend cannot be used here.
    """
    if name == DENSE:
        return None
    if name == "auto":
        return _fastest(device, dtype)
    if name not in BACKENDS:
        raise UnsupportedRequestError(
            f"unknown GGUF backend {name!r}; possible: auto, {', '.join(BACKENDS)}, {DENSE} (nothing stays packed)."
        )
    if problem := BACKENDS[name].problem(device, dtype):
        raise UnsupportedRequestError(f"GGUF backend {name!r} cannot be used here: {problem}.")
    return BACKENDS[name]


def _fastest(device: torch.device, dtype: torch.dtype) -> Backend | None:
    """The fastest backend. It is None for a CPU without a compiler, as dequantising at every call is far slower."""
    if _problem_on_cpus(device, dtype):
        # Not `TritonBackend`: nothing of it was measured on a GPU yet.
        return BACKENDS[DequantizeBackend.name]
    if binding.native_problem():
        return None
    return BACKENDS[QuantizingBackend.name if QuantizingBackend.is_faster(dtype) else NativeBackend.name]
