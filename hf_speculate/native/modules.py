"""Layers that hold packed weights, in the place of transformers' own.

They count as `nn.Linear` and `nn.Embedding`, so that PEFT puts LoRA around them as around those. What PEFT (or anybody)
would compute from their `weight` raises: it is no matrix.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from ..errors import UnsupportedRequestError
from . import binding
from .backends import Backend
from .formats import FORMATS


# Columns that a gradient needs unpacked at a time.
_UNITS = 64


_POSSIBLE = (
    "Plain LoRA on linear layers, output layer and embeddings works, unmerged. For anything that reads or changes the "
    "weights (merging, DoRA, modules_to_save, trainable tokens) load the file with load_gguf(..., backend='dense')."
)

# What may be asked of packed bytes.
_PROPERTIES = ("device", "dtype", "grad", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_quantized", "is_sparse")
_ANSWERED = {
    *(getattr(Tensor, name).__get__ for name in (*_PROPERTIES, "layout", "nbytes", "ndim", "requires_grad", "shape")),
    *(Tensor.data_ptr, Tensor.dim, Tensor.element_size, Tensor.is_complex, Tensor.is_floating_point, Tensor.numel),
    *(Tensor.__hash__, Tensor.__len__, Tensor.__repr__, Tensor.get_device, Tensor.size),
}


class PackedBytes(Tensor):
    """A view of packed weights for those who ask a layer's `weight` for its device: computing with it raises.

    Raises:
        UnsupportedRequestError: anything but what describes a tensor.
    """

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


class PackedModule(nn.Module):
    """The common part of packed layers.

    Attributes:
        packed: uint8, the packed bytes; a parameter, so that whoever looks for the device of the layer finds it.
    """

    packed: Tensor

    @property
    def weight(self) -> Tensor:
        """The packed bytes, to be asked for their device only."""
        return self.packed.as_subclass(PackedBytes)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        """Saves the packed rows as "weight", by which PEFT asks a file for what it copied (`modules_to_save`)."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if prefix + "packed" in destination:
            destination[prefix + "weight"] = destination.pop(prefix + "packed")

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        """PEFT is not strict when it loads what it saved of whole layers: that must not be left out in silence."""
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
    """x @ w.T with a gradient for x: heads are trained through the output matrix of their target."""

    @staticmethod
    def forward(ctx, inputs: Tensor, layer: PackedMatrix) -> Tensor:
        ctx.layer = layer
        return layer.backend.multiply(inputs, layer)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The gradient of the inputs: a packed matrix answers unit vectors with its columns."""
        layer = ctx.layer
        units = torch.eye(layer.in_features, dtype=gradient.dtype, device=gradient.device)
        parts = [gradient @ layer.backend.multiply(block, layer).T for block in units.split(_UNITS)]
        return torch.cat(parts, dim=1), None


class PackedMatrix(PackedModule):
    """Multiplies with a matrix that stays packed.

    Args:
        block_type: of the blocks in the file.
        backend: what packed the matrix and multiplies with it.
        tensors: what `Backend.pack` gave.
        bias: [out_features] in the dtype of the model, or None.
    """

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
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self.block_type = block_type
        self.backend = backend
        for name, tensor in tensors.items():
            if name == "packed":
                self.packed = nn.Parameter(tensor, requires_grad=False)
            else:
                # No part of a state dict, in which PEFT would look for each of its tensors in an adapter's file.
                self.register_buffer(name, tensor, persistent=False)
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


class PackedLinear(PackedMatrix, nn.Linear):  # type: ignore[override]
    """A linear layer whose matrix stays packed."""


class FusedLinear(nn.Module):
    """Several projections of one input as one product: the first one called computes all.

    Args:
        linear: their matrices, one below the other; no `nn.Linear`, which PEFT's "all-linear" would adapt.
        sizes: rows of each.
    """

    def __init__(self, linear: PackedMatrix, sizes: Sequence[int]):
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


class Projection(PackedModule, nn.Linear):  # type: ignore[override]
    """One of the projections of a `FusedLinear`; `packed` are the bytes of all of them together."""

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
    """Embeddings that stay in the file's blocks; the rows that are looked up are dequantised.

    Args:
        weight: uint8 [V, bytes of a row].
        block_type: of the blocks.
        dtype: of what is looked up.
        is_native: the kernel looks rows up, the same ones in half the time.
    """

    # What PEFT asks an embedding for: nothing of it is set.
    padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse = None, None, 2.0, False, False

    def __init__(self, weight: UInt8[Tensor, "V bytes"], block_type: str, dtype: torch.dtype, is_native: bool = False):
        nn.Module.__init__(self)
        block_format = FORMATS[block_type]
        self.num_embeddings = weight.shape[0]
        self.embedding_dim = weight.shape[1] // block_format.block_bytes * block_format.block_size
        self.block_type = block_type
        self.is_native = is_native
        self.packed = nn.Parameter(weight, requires_grad=False)
        # Follows `model.to(dtype)`, which the bytes do not.
        self.register_buffer("_of_dtype", torch.empty(0, dtype=dtype, device=weight.device), persistent=False)

    _of_dtype: Tensor

    def forward(self, token_ids: Int[Tensor, "*M"]) -> Float[Tensor, "*M H"]:  # type: ignore[override]
        ids = token_ids.reshape(-1)
        rows = self._native_rows(ids)
        if rows is None:
            rows = FORMATS[self.block_type].dequantize(self.packed[ids])
        return rows.to(self._of_dtype.dtype).view(*token_ids.shape, self.embedding_dim)

    def _native_rows(self, ids: Int[Tensor, " N"]) -> Float[Tensor, "N H"] | None:
        """None where the blocks are to be read by torch: while it traces, on other devices, for ids that are none."""
        if not self.is_native or torch.compiler.is_compiling() or not (ids.is_cpu and self.packed.is_cpu):
            return None
        return look_up(self.packed, self.block_type, self.embedding_dim, ids)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.block_type}"


def look_up(
    rows: UInt8[Tensor, "V bytes"], block_type: str, num_columns: int, ids: Int[Tensor, " N"]
) -> Float[Tensor, "N K"] | None:
    """`BlockFormat.dequantize` of some rows, bit for bit, in float32; None where one of them is not there.

    Args:
        rows: blocks as in the file.
        ids: from 0 on; torch's negative ones are none here.
    """
    library, ids = binding.library(), ids.long().contiguous()
    values = torch.empty(len(ids), num_columns)
    places = ids.data_ptr(), len(ids), values.data_ptr()
    is_done = library.look_up(library.kinds[block_type], rows.data_ptr(), len(rows), num_columns, *places)
    return values if is_done else None
