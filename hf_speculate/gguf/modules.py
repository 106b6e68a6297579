"""Layers that hold packed weights, in the place of transformers' own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from .backends import Backend
from .formats import FORMATS


# Columns that a gradient needs unpacked at a time.
_UNITS = 64


class _Product(torch.autograd.Function):
    """x @ w.T with a gradient for x: heads are trained through the output matrix of their target."""

    @staticmethod
    def forward(ctx, inputs: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        return layer.backend.multiply(inputs, layer)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """What is packed answers unit vectors with its columns."""
        layer = ctx.layer
        units = torch.eye(layer.in_features, dtype=gradient.dtype, device=gradient.device)
        parts = [gradient @ layer.backend.multiply(block, layer).T for block in units.split(_UNITS)]
        return torch.cat(parts, dim=1), None


class PackedLinear(nn.Module):
    """A linear layer whose matrix stays packed.

    Args:
        block_type: of the blocks in the file.
        backend: what packed the matrix and multiplies with it.
        tensors: what `Backend.pack` gave.
        bias: [out_features] in the dtype of the model, or None.

    Attributes:
        weight: the packed bytes; a parameter, so that whoever looks for the device of this layer finds it.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block_type: str,
        backend: Backend,
        tensors: dict[str, Tensor],
        bias: Tensor | None = None,
    ):
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.block_type = block_type
        self.backend = backend
        for name, tensor in tensors.items():
            if name == "weight":
                self.weight = nn.Parameter(tensor, requires_grad=False)
            else:
                self.register_buffer(name, tensor)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, inputs: Float[Tensor, "*M K"]) -> Float[Tensor, "*M N"]:
        rows = inputs.reshape(-1, self.in_features)
        needs_gradient = torch.is_grad_enabled() and rows.requires_grad
        products = _Product.apply(rows, self) if needs_gradient else self.backend.multiply(rows, self)
        if self.bias is not None:
            products += self.bias
        return products.view(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.block_type}, backend={self.backend.name}"


class FusedLinear(nn.Module):
    """Several projections of one input as one product: the first one called computes all.

    Args:
        linear: their matrices, one below the other.
        sizes: rows of each.
    """

    def __init__(self, linear: PackedLinear, sizes: Sequence[int]):
        super().__init__()
        self.linear = linear
        self.sizes = tuple(sizes)
        # Thread id -> input and products that its other projections are about to ask for.
        self._pending: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}

    def project(self, index: int, inputs: Tensor) -> Tensor:
        """Product `index`; computed anew for the first one and for inputs that are not those of the last call."""
        # Who traces is alone, and cannot look into this function.
        thread = 0 if torch.compiler.is_compiling() else threading.get_ident()
        known, products = self._pending.get(thread, (None, ()))
        if index == 0 or known is not inputs:
            products = self.linear(inputs).split(self.sizes, dim=-1)
            self._pending[thread] = inputs, products
        if index == len(self.sizes) - 1:
            del self._pending[thread]
        return products[index]

    def __getstate__(self):
        return self.__dict__ | {"_pending": {}}


class Projection(nn.Module):
    """One of the projections of a `FusedLinear`."""

    def __init__(self, fused: FusedLinear, index: int):
        super().__init__()
        self.fused = fused
        self.index = index
        self.in_features = fused.linear.in_features
        self.out_features = fused.sizes[index]

    @property
    def weight(self) -> Tensor:
        """The packed bytes of all projections together."""
        return self.fused.linear.weight

    @property
    def bias(self) -> Tensor | None:
        bias = self.fused.linear.bias
        return None if bias is None else bias.split(self.fused.sizes)[self.index]

    def forward(self, inputs: Float[Tensor, "*M K"]) -> Float[Tensor, "*M N"]:
        return self.fused.project(self.index, inputs)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, part {self.index}"


class PackedEmbedding(nn.Module):
    """Embeddings that stay in the file's blocks; the rows that are looked up are dequantised.

    Args:
        weight: uint8 [V, bytes of a row].
        block_type: of the blocks.
        dtype: of what is looked up.
        is_mapped: whether the bytes are the file's own pages and not a copy in memory.
    """

    def __init__(self, weight: UInt8[Tensor, "V bytes"], block_type: str, dtype: torch.dtype, is_mapped: bool = False):
        super().__init__()
        block_format = FORMATS[block_type]
        self.num_embeddings = weight.shape[0]
        self.embedding_dim = weight.shape[1] // block_format.block_bytes * block_format.block_size
        self.block_type = block_type
        self.is_mapped = is_mapped
        self.weight = nn.Parameter(weight, requires_grad=False)
        # Follows `model.to(dtype)`, which the bytes do not.
        self.register_buffer("_of_dtype", torch.empty(0, dtype=dtype, device=weight.device), persistent=False)

    _of_dtype: Tensor

    def forward(self, token_ids: Int[Tensor, "*M"]) -> Float[Tensor, "*M H"]:
        rows = FORMATS[self.block_type].dequantize(self.weight[token_ids.reshape(-1)])
        return rows.to(self._of_dtype.dtype).view(*token_ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.block_type}"
