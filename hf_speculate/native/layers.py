"""Decoder layers as the native kernel takes them, and what their queries see.

Structures: those of `kernel/layer.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from . import binding
from .layer_parts import LayerParts, matrix_of
from .modules import Projection
from .weights import MatrixStructure, WeightsInPlace, fields, fill_matrix


# Rows of an input that the kernel has room for (its CHUNK).
MOST_ROWS = 128

# Of a row, beside the queries: ancestors that were run before, and what it sees in one piece.
_MOST_RUNS = 32

# Of a layer, in the order of its structure.
_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "beside_norm")

_MASK_KINDS = {torch.bool: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class _Layer(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "hidden", "heads", "kv_heads", "head_dim", "inner"),
        *fields(ctypes.c_int64, "q_at", "k_at", "v_at", "gate_at", "up_at"),
        *fields(ctypes.c_double, "eps", "scale"),
        *fields(ctypes.c_void_p, *_NORMS),
        *fields(ctypes.c_int64, "joins", "norms_residual"),
        *((name, MatrixStructure * most) for name, most in (("qkv", 3), ("output", 1), ("gate_up", 2), ("down", 1))),
    ]


class CallStructure(ctypes.Structure):
    """`Call` of the kernel.

    Attributes:
        kept: the objects that it points to.
    """

    kept: Any
    _fields_ = [
        *fields(ctypes.c_void_p, "x", "beside", "y"),
        *fields(ctypes.c_int64, "num_layers"),
        *fields(ctypes.c_void_p, "layers"),
        *fields(ctypes.c_int64, "batch_size", "num_queries", "num_keys"),
        *fields(ctypes.c_void_p, "cos", "sin"),
        *fields(ctypes.c_int64, "rotary_stride"),
        *fields(ctypes.c_void_p, "keys", "values", "batch_strides", "head_strides", "offsets", "runs"),
        *fields(ctypes.c_int64, "is_bf16", "rounds", "threads"),
    ]


class NativeLayer:
    """The weights of one decoder layer, where they lie in memory now.

    Attributes:
        address: of the structure.
    """

    def __init__(self, parts: LayerParts):
        self._layer = _Layer(
            **parts.sizes,
            eps=parts.eps,
            scale=parts.scale,
            **{name: norm.weight.data_ptr() for name, norm in parts.norms.items()},
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
                fill_matrix(places[len(columns)], matrix)
                columns[matrix] = width
                width += matrix.out_features
            if field:
                before = projection.fused.sizes[: projection.index] if isinstance(projection, Projection) else ()
                setattr(self._layer, field, columns[matrix] + sum(before))


class NativeLayers:
    """Consecutive layers of one decoder.

    Args:
        layers: each of which fits, of the same sizes and type.

    Attributes:
        dtype: of states and caches.
        rounds: whether inputs of packed matrices are rounded to bytes.
        heads: of keys, and their size.
    """

    def __init__(self, layers: Sequence[LayerParts]):
        self._layers = [NativeLayer(layer) for layer in layers]
        self._addresses = (ctypes.c_void_p * len(layers))(*(layer.address for layer in self._layers))
        self._weights = WeightsInPlace([module for layer in layers for module in layer.modules])
        self._library = binding.library()
        self.rounds = layers[0].rounds() or False
        self.dtype = self._weights.dtype
        self.heads = layers[0].sizes["kv_heads"], layers[0].sizes["head_dim"]

    @classmethod
    def of(cls, layers: Sequence[LayerParts | None]) -> NativeLayers | None:
        """None where the kernel does not compute all of them in one call."""
        known = [parts for parts in layers if parts is not None and parts.fit()]
        is_alike = len({(parts.dtype(), parts.rounds()) for parts in known}) == 1
        return cls(known) if is_alike and len(known) == len(layers) else None

    def __len__(self) -> int:
        return len(self._layers)

    def is_current(self) -> bool:
        """See `WeightsInPlace.are_current`."""
        return self._weights.are_current()

    def has_gradients(self) -> bool:
        """Whether somebody trains a weight."""
        return self._weights.have_gradients()

    def call(self, buffers: Sequence[tuple[Tensor, Tensor]]) -> CallStructure:
        """A call of these layers with its cache, without any rows; it keeps what it points to.

        Args:
            buffers: see `run`.
        """
        count, strides = len(self._layers), [keys.stride() for keys, _ in buffers]
        pointers, sizes = ctypes.c_void_p * count, ctypes.c_int64 * count
        call = CallStructure(num_layers=count, layers=ctypes.addressof(self._addresses))
        call.kept = (
            self,
            (
                pointers(*(keys.data_ptr() for keys, _ in buffers)),
                pointers(*(values.data_ptr() for _, values in buffers)),
                sizes(*(stride[0] for stride in strides)),
                sizes(*(stride[1] for stride in strides)),
            ),
        )
        call.keys, call.values, call.batch_strides, call.head_strides = map(ctypes.addressof, call.kept[1])
        call.is_bf16, call.rounds = self.dtype is torch.bfloat16, self.rounds
        call.threads = torch.get_num_threads()
        return call

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
        batch_size, num_queries, _ = inputs.shape
        outputs = inputs.new_empty(len(self._layers), *inputs.shape)
        (cos, sin), call = rotary, self.call(buffers)
        call.x, call.y = inputs.data_ptr(), outputs.data_ptr()
        call.beside = None if beside is None else beside.data_ptr()
        call.batch_size, call.num_queries, call.num_keys = batch_size, num_queries, num_keys
        call.cos, call.sin, call.rotary_stride = (
            cos.data_ptr(),
            sin.data_ptr(),
            0 if cos.shape[0] == 1 else cos.stride(0),
        )
        if sight is not None:
            call.offsets, call.runs = sight[0].data_ptr(), sight[1].data_ptr()
        if not self._library.run_layers(ctypes.addressof(call)):
            raise MemoryError(f"no memory for {batch_size * num_queries} rows behind {num_keys} entries")
        return outputs


def batch_parts(batch_size: int, num_queries: int) -> list[slice]:
    """So many texts each as the kernel takes at once."""
    step = max(MOST_ROWS // num_queries, 1)
    return [slice(start, start + step) for start in range(0, batch_size, step)]


def part_of(
    rows: slice, num_queries: int, buffers: Sequence[tuple[Tensor, Tensor]], sight: tuple[Tensor, Tensor] | None
) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor] | None]:
    """Buffers and sight of some texts, see `NativeLayers.run`."""
    if sight is not None:  # offsets count from the first run of all
        sight = sight[0][rows.start * num_queries : rows.stop * num_queries + 1], sight[1]
    return [(keys[rows], values[rows]) for keys, values in buffers], sight


def find_sight(mask: Tensor, batch_size: int, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor] | None:
    """The entries that each query of a mask sees, as runs.

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
    found = binding.library().find_runs(
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
