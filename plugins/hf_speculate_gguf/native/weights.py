"""Weights as the kernel reads them: at their present addresses."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import binding
from .formats import FORMATS
from .memory import address_of, places_of
from .modules import PackedEmbedding, PackedMatrix, ScaledEmbedding
from .quantized import QuantizedMatrix


def fields(kind: type, *names: str) -> list[tuple[str, Any]]:
    """Fields of a structure that have the same type."""
    return [(name, kind) for name in names]


@binding.mirrors("Matrix")
class MatrixStructure(ctypes.Structure):
    """`Matrix` of `kernel/packed.h`."""

    _fields_ = [
        *fields(ctypes.c_int64, "kind", "in_features", "out_features"),
        *fields(ctypes.c_void_p, "tiles", "bias"),
    ]


def fill_matrix(place: MatrixStructure, matrix: PackedMatrix | nn.Linear, dtype: torch.dtype) -> None:
    """Fills the structure for a matrix from `matrix_of`, in a call whose states have this dtype."""
    library, size = binding.library(), (matrix.out_features, matrix.in_features)
    if isinstance(matrix, PackedMatrix):
        place.kind = library.kinds[matrix.block_type]
        place.tiles = library.address_of_tiles(matrix.packed, matrix.block_type, size[1], size[0])
    else:
        place.kind = library.kinds[binding.DENSE_KINDS[dtype]]
        place.tiles = address_of(matrix.weight, dtype, size)
    place.out_features, place.in_features = size
    if matrix.bias is not None:
        place.bias = address_of(matrix.bias, dtype, size[:1])


def fill_embeddings(place: MatrixStructure, module: nn.Module, dtype: torch.dtype, are_scaled: bool = False) -> bool:
    """Fills the structure for an embedding with results of this dtype; returns whether the kernel can do that.

    A module with a factor is only known where the caller multiplies results by it (`are_scaled`).
    """
    is_packed = type(module) is PackedEmbedding
    of: Any = module
    is_known = is_packed or type(module) in (nn.Embedding, ScaledEmbedding)
    if not is_known or "forward" in vars(module) or of.max_norm is not None or (scale_of(of) != 1 and not are_scaled):
        return False
    weight, own_dtype = (of.packed, of._of_dtype.dtype) if is_packed else (of.weight, of.weight.dtype)
    if not weight.is_cpu or not weight.is_contiguous() or own_dtype is not dtype:
        return False
    place.kind = binding.library().kinds[of.block_type if is_packed else binding.DENSE_KINDS[dtype]]
    place.out_features, place.in_features = size = of.num_embeddings, of.embedding_dim
    if is_packed:
        blocks = FORMATS[of.block_type]
        size = size[0], size[1] // blocks.block_size * blocks.block_bytes
    place.tiles = address_of(weight, torch.uint8 if is_packed else dtype, size)
    return True


def scale_of(embeddings: Any) -> float:
    """The factor of all embeddings of a module."""
    return getattr(embeddings, "scale", 1.0)


Place = tuple[dict[str, Any], str]
"""The dict that holds a parameter, and its name there."""


def parameters_of(modules: Iterable[nn.Module]) -> list[Place]:
    """The owner and name of each parameter of these modules; for a quantised matrix those of its source."""
    sources = [module.source if isinstance(module, QuantizedMatrix) else module for module in modules]
    return [(module._parameters, name) for module in sources for name in module._parameters]


def unpacked(places: Sequence[Place]) -> list[Tensor]:
    """The parameters that exist and are not packed."""
    return [of[name] for of, name in places if name != "packed" and of[name] is not None]


class WeightsInPlace:
    """The weights that structures point to, or that were copied.

    The modules are kept alive: nothing else holds quantised ones. Where weights were copied (`are_copied`), as for
    quantised matrices, a write makes the copy outdated. (Writes under `torch.inference_mode` are not counted.)
    """

    def __init__(self, modules: Iterable[nn.Module], are_copied: bool = False):
        self._modules = list(dict.fromkeys(modules))
        self._counts_writes = are_copied or any(isinstance(module, QuantizedMatrix) for module in self._modules)
        self._places = parameters_of(self._modules)
        self._tensors = [of[name] for of, name in self._places]
        self._facts = self._read()
        self.dtype = self._tensors[0].dtype

    def are_current(self) -> bool:
        """Whether the weights are the same tensors at the same addresses and of the same dtype. `model.to` moves
        them."""
        tensors: list[Any] = [of.get(name) for of, name in self._places]
        return (
            all(map(operator.is_, tensors, self._tensors))
            and tensors[0].dtype is self.dtype
            and self._read() == self._facts
        )

    def have_gradients(self) -> bool:
        """Whether a weight requires a gradient."""
        return any(tensor is not None and tensor.requires_grad for tensor in self._tensors)

    def _read(self) -> list[int]:
        """The addresses of the weights, and their version counters where writes matter."""
        tensors = [tensor for tensor in self._tensors if tensor is not None]
        pointers = places_of(tensors)
        if not self._counts_writes:
            return pointers
        return pointers + [tensor._version for tensor in tensors if not tensor.is_inference()]
