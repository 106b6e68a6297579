"""Decoder layers as the native kernel takes them, and what their queries see.

Structures: those of `kernel/layer.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from . import native
from .backends import NativeBackend
from .modules import PackedMatrix, Projection


# What the kernel has room for: rows of an input, columns of a head, heads that share keys (its CHUNK, MOST_HEAD_DIM and
# MOST_GROUPS).
MOST_ROWS, _MOST_HEAD_DIM, _MOST_GROUPS = 128, 512, 128

# Columns that are multiplied at a time.
_COLUMNS = 32

# Of a row, beside the queries: ancestors that were run before, and what it sees in one piece.
_MOST_RUNS = 32

_DENSE_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16"}

# Of a layer, in the order of its structure.
_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "beside_norm")

_MASK_KINDS = {torch.bool: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def _fields(kind: type, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class _Matrix(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_int64, "kind", "in_features", "out_features"),
        *_fields(ctypes.c_void_p, "tiles", "bias"),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_int64, "hidden", "heads", "kv_heads", "head_dim", "inner"),
        *_fields(ctypes.c_int64, "q_at", "k_at", "v_at", "gate_at", "up_at"),
        *_fields(ctypes.c_double, "eps", "scale"),
        *_fields(ctypes.c_void_p, *_NORMS),
        *_fields(ctypes.c_int64, "joins", "norms_residual"),
        *((name, _Matrix * most) for name, most in (("qkv", 3), ("output", 1), ("gate_up", 2), ("down", 1))),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_void_p, "x", "beside", "y"),
        *_fields(ctypes.c_int64, "num_layers"),
        *_fields(ctypes.c_void_p, "layers"),
        *_fields(ctypes.c_int64, "batch_size", "num_queries", "num_keys"),
        *_fields(ctypes.c_void_p, "cos", "sin"),
        *_fields(ctypes.c_int64, "rotary_stride"),
        *_fields(ctypes.c_void_p, "keys", "values", "batch_strides", "head_strides", "offsets", "runs"),
        *_fields(ctypes.c_int64, "is_bf16", "rounds", "threads"),
    ]


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """What a decoder layer is made of, whosever its modules are.

    Attributes:
        sizes: hidden, heads, kv_heads, head_dim, inner.
        norms: weights of RMSNorms by the names of the structure, those that there are.
        projections: q, k, v, o, gate, up, down, each packed by the native backend or an `nn.Linear`.
        joins, norms_residual: of EAGLE-3's first layer, see there.
    """

    sizes: dict[str, int]
    eps: float
    scale: float
    norms: dict[str, Tensor]
    projections: dict[str, nn.Module]
    joins: bool = False
    norms_residual: bool = False

    @property
    def matrices(self) -> list[PackedMatrix | nn.Linear | None]:
        return [matrix_of(projection) for projection in self.projections.values()]

    def rounds(self) -> bool | None:
        """Whether inputs are rounded to bytes; None where the kernel does not multiply with all of the matrices, or
        not alike."""
        found = {_rounds(matrix) for matrix in self.matrices}
        return found.pop() if len(found) == 1 else None

    def fit(self) -> bool:
        """Whether the kernel computes such a layer."""
        sizes, step = self.sizes, native.TILE_ROWS
        widths = sizes["hidden"], sizes["heads"] * sizes["head_dim"], sizes["inner"]
        return (
            self.rounds() is not None
            and all(matrix is not None and matrix.out_features % step == 0 for matrix in self.matrices)
            and all(width % _COLUMNS == 0 for width in widths)
            and sizes["head_dim"] % step == 0
            and sizes["head_dim"] <= _MOST_HEAD_DIM
            and sizes["heads"] <= _MOST_GROUPS * sizes["kv_heads"]
        )


def _rounds(matrix: PackedMatrix | nn.Linear | None) -> bool | None:
    if isinstance(matrix, PackedMatrix):
        return matrix.backend.rounds if isinstance(matrix.backend, NativeBackend) else None
    return None if matrix is None or not matrix.weight.is_contiguous() else False


class NativeLayer:
    """The weights of one decoder layer, where they lie in memory now.

    Attributes:
        tensors: what must not move.
        address: of the structure.
    """

    def __init__(self, parts: LayerParts):
        self.tensors: list[Tensor] = list(parts.norms.values())
        self._layer = _Layer(
            **parts.sizes,
            eps=parts.eps,
            scale=parts.scale,
            **{name: weight.data_ptr() for name, weight in parts.norms.items()},
            joins=parts.joins,
            norms_residual=parts.norms_residual,
        )
        of = parts.projections
        stages = {
            "qkv": {"q_at": of["q"], "k_at": of["k"], "v_at": of["v"]},
            "output": {"": of["o"]},
            "gate_up": {"gate_at": of["gate"], "up_at": of["up"]},
            "down": {"": of["down"]},
        }
        for name, projections in stages.items():
            self._place(getattr(self._layer, name), projections)
        self.address = ctypes.addressof(self._layer)

    def _place(self, places: Any, projections: dict[str, nn.Module]) -> None:
        """Matrices of one input in the order in which they are first met, their outputs beside each other."""
        columns: dict[nn.Module, int] = {}
        width = 0
        for field, projection in projections.items():
            matrix = matrix_of(projection)
            assert matrix is not None
            if matrix not in columns:
                self._fill(places[len(columns)], matrix)
                columns[matrix] = width
                width += matrix.out_features
            if field:
                before = projection.fused.sizes[: projection.index] if isinstance(projection, Projection) else ()
                setattr(self._layer, field, columns[matrix] + sum(before))

    def _fill(self, place: _Matrix, matrix: PackedMatrix | nn.Linear) -> None:
        is_packed = isinstance(matrix, PackedMatrix)
        weight: Tensor = matrix.packed if is_packed else matrix.weight
        place.kind = native.library().kinds[matrix.block_type if is_packed else _DENSE_KINDS[weight.dtype]]
        place.in_features, place.out_features = matrix.in_features, matrix.out_features
        place.tiles = weight.data_ptr()
        self.tensors.append(weight)
        if matrix.bias is not None:
            self.tensors.append(matrix.bias)
            place.bias = matrix.bias.data_ptr()


class NativeLayers:
    """Consecutive layers of one decoder.

    Args:
        layers: each of which fits, of the same sizes.
    """

    def __init__(self, layers: Sequence[LayerParts]):
        self._layers = [NativeLayer(layer) for layer in layers]
        self._addresses = (ctypes.c_void_p * len(layers))(*(layer.address for layer in self._layers))
        self._tensors = [tensor for layer in self._layers for tensor in layer.tensors]
        self._pointers = [tensor.data_ptr() for tensor in self._tensors]
        self._library = native.library()
        self._rounds = layers[0].rounds() or False
        self.dtype = self._tensors[0].dtype

    def is_current(self) -> bool:
        """Whether the weights lie where they lay, in the type that they had (`model.to` moves them)."""
        pointers = [tensor.data_ptr() for tensor in self._tensors]
        return self._tensors[0].dtype is self.dtype and pointers == self._pointers

    def run(
        self,
        inputs: Float[Tensor, "B N H"],
        rotary: tuple[Float[Tensor, "R N D"], Float[Tensor, "R N D"]],
        buffers: Sequence[tuple[Tensor, Tensor]],
        num_keys: int,
        sight: tuple[Tensor, Tensor] | None,
        beside: Float[Tensor, "B N H"] | None = None,
    ) -> Float[Tensor, "L B N H"]:
        """The outputs of every layer; writes the entries of the queries into the cache.

        Args:
            inputs: contiguous, of `dtype`.
            rotary: cosines and sines, contiguous; R is B or 1.
            buffers: of each layer's keys and values [B, KV, capacity, D], alike, entries contiguous.
            num_keys: with those of the queries, which are the last ones.
            sight: from `find_sight`; None: all before a query, and itself.
            beside: contiguous, what layers that join it attend with.
        Raises:
            MemoryError: there is none left; nothing was written.
        """
        (batch_size, num_queries, _), count = inputs.shape, len(self._layers)
        outputs = inputs.new_empty(count, *inputs.shape)
        pointers, sizes = ctypes.c_void_p * count, ctypes.c_int64 * count
        strides = [keys.stride() for keys, _ in buffers]
        arrays = (
            pointers(*(keys.data_ptr() for keys, _ in buffers)),
            pointers(*(values.data_ptr() for _, values in buffers)),
            sizes(*(stride[0] for stride in strides)),
            sizes(*(stride[1] for stride in strides)),
        )
        cos, sin = rotary
        call = _Call(
            inputs.data_ptr(),
            None if beside is None else beside.data_ptr(),
            outputs.data_ptr(),
            count,
            ctypes.addressof(self._addresses),
            batch_size,
            num_queries,
            num_keys,
            cos.data_ptr(),
            sin.data_ptr(),
            0 if cos.shape[0] == 1 else cos.stride(0),
            *map(ctypes.addressof, arrays),
            sight[0].data_ptr() if sight else None,
            sight[1].data_ptr() if sight else None,
            inputs.dtype is torch.bfloat16,
            self._rounds,
            torch.get_num_threads(),
        )
        if not self._library.run_layers(ctypes.addressof(call)):
            raise MemoryError(f"no memory for {batch_size * num_queries} rows behind {num_keys} entries")
        return outputs


def matrix_of(projection: nn.Module) -> PackedMatrix | nn.Linear | None:
    """The matrix that computes a projection; None where that is something else."""
    if type(projection) is Projection:
        return projection.fused.linear
    return projection if isinstance(projection, PackedMatrix) or type(projection) is nn.Linear else None


def find_sight(mask: Tensor, batch_size: int, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor] | None:
    """What each query of a mask sees, as runs of entries.

    Args:
        mask: [B or 1, 1, at least N, S], 0 or True where an entry is seen, the lowest value or False where it is not;
            or as `target.fold` makes them.
    Returns:
        int32 [B * N + 1], where the runs of each query begin, and int32 [runs, 2], each from its first entry to its
        end; None where the mask holds other values, or more runs than trees need.
    """
    kind, num_rows = _MASK_KINDS.get(mask.dtype), batch_size * num_queries
    if kind is None or mask.stride(-1) != 1:
        return None
    most = num_rows * (num_queries + _MOST_RUNS)
    offsets, runs = torch.empty(num_rows + 1, dtype=torch.int32), torch.empty(most, 2, dtype=torch.int32)
    found = native.library().find_runs(
        mask.data_ptr(),
        kind,
        0 if mask.shape[0] == 1 else mask.stride(0),
        mask.stride(2),
        batch_size,
        num_queries,
        mask.shape[3],
        num_keys,
        offsets.data_ptr(),
        runs.data_ptr(),
        most,
    )
    return (offsets, runs) if found >= 0 else None
