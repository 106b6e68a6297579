"""Layers with packed weights, in place of transformers' own.

They are subclasses of `nn.Linear` and `nn.Embedding`, so that PEFT puts LoRA around them. Computing with their `weight`
raises an error: it is not a matrix.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Int64, UInt8
from torch import Tensor, nn
from torch.nn import functional

from hf_speculate.errors import UnsupportedRequestError

from .backends import Backend
from .formats import FORMATS


# Number of columns that a gradient unpacks at a time.
_UNITS = 64


_POSSIBLE = (
    "Plain LoRA on linear layers, output layer and embeddings works, unmerged. For anything that reads or changes the "
    "weights (merging, DoRA, modules_to_save, trainable tokens) load the file with load_gguf(..., backend='dense')."
)

# Properties and methods of packed bytes that may be used.
_PROPERTIES = ("device", "dtype", "grad", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_quantized", "is_sparse")
_ANSWERED = {
    *(getattr(Tensor, name).__get__ for name in (*_PROPERTIES, "layout", "nbytes", "ndim", "requires_grad", "shape")),
    *(Tensor.data_ptr, Tensor.dim, Tensor.element_size, Tensor.is_complex, Tensor.is_floating_point, Tensor.numel),
    *(Tensor.__hash__, Tensor.__len__, Tensor.__repr__, Tensor.get_device, Tensor.size),
}


class PackedBytes(Tensor):
    """A view of packed weights for code that reads a `weight`'s device or shape. Computing with it raises an error."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in _ANSWERED:
            descriptor = getattr(func, "__self__", None)
            name = getattr(descriptor if func.__name__ == "__get__" else func, "__name__", str(func))
            raise UnsupportedRequestError(
                f"{name!r} was asked of the weights of a GGUF layer, which are packed. {_POSSIBLE}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class PackedParameter(nn.Parameter):
    """Packed bytes as a parameter, which refuses gradients."""

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value:
            raise UnsupportedRequestError(
                f"the weights of this GGUF layer are packed and take no gradients. {_POSSIBLE}"
            )

    def requires_grad_(self, requires_grad: bool = True) -> PackedParameter:  # type: ignore[override]
        self.requires_grad = requires_grad
        return self


class PackedModule(nn.Module):
    """The common part of packed layers. Their bytes are a parameter: code that looks for a layer's device finds it."""

    packed: Tensor

    @property
    def num_weights(self) -> int:
        """Number of weights in the packed bytes."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The packed bytes; only their properties can be read."""
        return self.packed.as_subclass(PackedBytes)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        """Saves the packed bytes as "weight", the name by which PEFT looks for copies (`modules_to_save`)."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if prefix + "packed" in destination:
            destination[prefix + "weight"] = destination.pop(prefix + "packed")

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        """Raises for weights that are not packed: PEFT would leave them out without an error."""
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.is_floating_point():
            raise UnsupportedRequestError(
                f"{prefix}weight, of {weight.dtype}, is to be loaded into a GGUF layer, whose weights are packed. "
                f"{_POSSIBLE} (Adapters of embeddings or output layer come without the layer's own weights where they "
                "are saved with save_embedding_layers=False.)"
            )
        if weight is not None:
            state_dict[prefix + "packed"] = state_dict.pop(prefix + "weight")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class _Product(torch.autograd.Function):
    """x @ w.T with a gradient for x: heads are trained through their target's output matrix."""

    @staticmethod
    def forward(ctx, inputs: Tensor, layer: PackedMatrix) -> Tensor:
        ctx.layer = layer
        return layer.backend.multiply(inputs, layer)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The gradient of the inputs. Unit vectors give the columns of the packed matrix."""
        layer = ctx.layer
        units = torch.eye(layer.in_features, dtype=gradient.dtype, device=gradient.device)
        parts = [gradient @ layer.backend.multiply(block, layer).T for block in units.split(_UNITS)]
        return torch.cat(parts, dim=1), None


class PackedMatrix(PackedModule):
    """Multiplies with a matrix that stays packed: `packed`, in the layout of its backend (`Backend.pack`)."""

    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block_type: str,
        backend: Backend,
        packed: Tensor,
        bias: Tensor | None = None,
    ):
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self.block_type = block_type
        self.backend = backend
        self.packed = PackedParameter(packed, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    def forward(self, inputs: Float[Tensor, "*M K"]) -> Float[Tensor, "*M N"]:
        rows = inputs.reshape(-1, self.in_features)
        needs_gradient = torch.is_grad_enabled() and rows.requires_grad
        products = _Product.apply(rows, self) if needs_gradient else self.backend.multiply(rows, self)
        if self.bias is not None:
            products += self.bias
        return products.view(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.block_type}, backend={self.backend.name}"


class PackedLinear(PackedMatrix, nn.Linear):  # type: ignore[override]
    """A linear layer whose matrix stays packed."""

    def first_rows(self, count: int) -> PackedLinear:
        """A layer of the first rows only, whose bytes are this layer's."""
        packed = self.packed.data[: -(-count // self.backend.rows_together)]
        bias = None if self.bias is None else self.bias.data[:count]
        return PackedLinear(self.in_features, count, self.block_type, self.backend, packed, bias)


class ReorderedLinear(PackedMatrix, nn.Linear):  # type: ignore[override]
    """A packed linear layer whose columns are in another order than its inputs.

    Args:
        order: column of the inputs that each column of the matrix multiplies.
    """

    order: Tensor

    def __init__(self, *arguments: Any, order: Int64[Tensor, " K"]):
        super().__init__(*arguments)
        self.register_buffer("order", order.to(self.packed.device), persistent=False)

    def forward(self, inputs: Float[Tensor, "*M K"]) -> Float[Tensor, "*M N"]:  # type: ignore[override]
        return super().forward(inputs[..., self.order])


class FusedLinear(nn.Module):
    """Several projections of one input as one product. The first one that is called computes all.

    `linear` has the matrices of all projections, stacked. It is not an `nn.Linear`, which PEFT's "all-linear" would
    adapt.
    """

    def __init__(self, linear: PackedMatrix, sizes: Sequence[int]):
        super().__init__()
        self.linear = linear
        self.sizes = tuple(sizes)
        # Thread id -> input and products for the projections that will be called next.
        self._pending: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}

    def project(self, index: int, inputs: Tensor) -> Tensor:
        """Product `index`. It is computed for the first projection, and for another input than the last call's."""
        # Tracing runs on one thread and cannot call this function.
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


class Projection(PackedModule, nn.Linear):  # type: ignore[override]
    """One projection of a `FusedLinear`; `packed` has the bytes of all its projections."""

    def __init__(self, fused: FusedLinear, index: int):
        nn.Module.__init__(self)
        self.fused = fused
        self.index = index
        self.in_features = fused.linear.in_features
        self.out_features = fused.sizes[index]

    @property
    def packed(self) -> Tensor:  # type: ignore[override]
        return self.fused.linear.packed

    @property
    def bias(self) -> Tensor | None:
        bias = self.fused.linear.bias
        return None if bias is None else bias.split(self.fused.sizes)[self.index]

    def forward(self, inputs: Float[Tensor, "*M K"]) -> Float[Tensor, "*M N"]:  # type: ignore[override]
        return self.fused.project(self.index, inputs)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, part {self.index}"


class PackedEmbedding(PackedModule, nn.Embedding):  # type: ignore[override]
    """Embeddings that stay in the file's blocks; only rows that are looked up are dequantised.

    Results have the given dtype; `scale` is their factor, rounded to it before, as in Gemma.
    """

    # Attributes that PEFT reads from an embedding, at their defaults.
    padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse = None, None, 2.0, False, False

    def __init__(
        self,
        weight: UInt8[Tensor, "V bytes"],
        block_type: str,
        dtype: torch.dtype,
        scale: float = 1.0,
    ):
        nn.Module.__init__(self)
        block_format = FORMATS[block_type]
        self.num_embeddings = weight.shape[0]
        self.embedding_dim = weight.shape[1] // block_format.block_bytes * block_format.block_size
        self.block_type = block_type
        self.scale = scale
        self.packed = PackedParameter(weight, requires_grad=False)
        # This follows `model.to(dtype)`; the bytes do not.
        self.register_buffer("_of_dtype", torch.empty(0, dtype=dtype, device=weight.device), persistent=False)

    _of_dtype: Tensor

    @property
    def num_weights(self) -> int:
        return self.num_embeddings * self.embedding_dim

    def forward(self, token_ids: Int[Tensor, "*M"]) -> Float[Tensor, "*M H"]:  # type: ignore[override]
        # Unlike an index, this function takes no negative ids.
        rows = FORMATS[self.block_type].dequantize(functional.embedding(token_ids.reshape(-1), self.packed))
        dtype = self._of_dtype.dtype
        return scaled(rows.to(dtype), self.scale).view(*token_ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.block_type}"


class ScaledEmbedding(nn.Embedding):
    """Dense embeddings with a factor, which is rounded to their dtype before, as in Gemma."""

    def __init__(self, weight: Float[Tensor, "V H"], scale: float):
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight, _freeze=True)
        self.scale = scale

    def forward(self, input: Int[Tensor, "*M"]) -> Float[Tensor, "*M H"]:
        return scaled(super().forward(input), self.scale)


def scaled(states: Tensor, factor: float) -> Tensor:
    """States times a factor that has their dtype."""
    return states if factor == 1 else states * rounded_factor(factor, states.dtype)


def rounded_factor(factor: float, dtype: torch.dtype) -> float:
    """A factor as a number of this dtype."""
    return torch.tensor(factor, dtype=torch.float32, device="cpu").to(dtype).item()
