"""Packed decoder layers as the native kernel takes them, and what their queries see.

Structures: those of `kernel/layer.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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

# Of a layer, in the order of its structure; those of queries and keys are Qwen3's.
_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm")

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
        *_fields(ctypes.c_void_p, "attention_norm", "mlp_norm", "q_norm", "k_norm"),
        *((name, _Matrix * most) for name, most in (("qkv", 3), ("output", 1), ("gate_up", 2), ("down", 1))),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_void_p, "x", "y"),
        *_fields(ctypes.c_int64, "num_layers"),
        *_fields(ctypes.c_void_p, "layers"),
        *_fields(ctypes.c_int64, "batch_size", "num_queries", "num_keys"),
        *_fields(ctypes.c_void_p, "cos", "sin"),
        *_fields(ctypes.c_int64, "rotary_stride"),
        *_fields(ctypes.c_void_p, "keys", "values", "batch_strides", "head_strides", "offsets", "runs"),
        *_fields(ctypes.c_int64, "is_bf16", "rounds", "threads"),
    ]


class NativeLayer:
    """The weights of one decoder layer, where they lie in memory now.

    Args:
        layer: of transformers' Llama, Qwen2 or Qwen3, its projections packed by the native backend.

    Attributes:
        tensors: what must not move.
        address: of the structure.
    """

    def __init__(self, layer: Any):
        attention, mlp, config = layer.self_attn, layer.mlp, layer.self_attn.config
        norms = [layer.input_layernorm, layer.post_attention_layernorm, *_head_norms(attention)]
        self.tensors: list[Tensor] = [norm.weight for norm in norms]
        self._layer = _Layer(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            inner=config.intermediate_size,
            eps=layer.input_layernorm.variance_epsilon,
            scale=attention.scaling,
            **dict(zip(_NORMS, (weight.data_ptr() for weight in self.tensors), strict=False)),
        )
        stages = {
            "qkv": {"q_at": attention.q_proj, "k_at": attention.k_proj, "v_at": attention.v_proj},
            "output": {"": attention.o_proj},
            "gate_up": {"gate_at": mlp.gate_proj, "up_at": mlp.up_proj},
            "down": {"": mlp.down_proj},
        }
        for name, projections in stages.items():
            self._place(getattr(self._layer, name), projections)
        self.address = ctypes.addressof(self._layer)

    def _place(self, places: Any, projections: dict[str, nn.Module]) -> None:
        """Matrices of one input in the order in which they are first met, their outputs beside each other."""
        columns: dict[PackedMatrix, int] = {}
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

    def _fill(self, place: _Matrix, matrix: PackedMatrix) -> None:
        self.tensors.append(matrix.packed)
        place.kind = native.library().kinds[matrix.block_type]
        place.in_features, place.out_features = matrix.in_features, matrix.out_features
        place.tiles = matrix.packed.data_ptr()
        if matrix.bias is not None:
            self.tensors.append(matrix.bias)
            place.bias = matrix.bias.data_ptr()


class NativeLayers:
    """Consecutive layers of one decoder.

    Args:
        layers: of transformers' Llama, Qwen2 or Qwen3, each of which `fits_kernel`, of the same sizes and backend.
    """

    def __init__(self, layers: Sequence[Any]):
        backend = _backend_of(_matrices(layers[0]))
        assert backend is not None
        self._layers = [NativeLayer(layer) for layer in layers]
        self._addresses = (ctypes.c_void_p * len(layers))(*(layer.address for layer in self._layers))
        self._tensors = [tensor for layer in self._layers for tensor in layer.tensors]
        self._pointers = [tensor.data_ptr() for tensor in self._tensors]
        self._library = native.library()
        self._rounds = backend.rounds
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
    ) -> Float[Tensor, "L B N H"]:
        """The outputs of every layer; writes the entries of the queries into the cache.

        Args:
            inputs: contiguous, of `dtype`.
            rotary: cosines and sines, contiguous; R is B or 1.
            buffers: of each layer's keys and values [B, KV, capacity, D], alike, entries contiguous.
            num_keys: with those of the queries, which are the last ones.
            sight: from `find_sight`; None: all before a query, and itself.
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


def matrix_of(projection: nn.Module) -> PackedMatrix | None:
    """The matrix that computes a projection; None where it is not packed."""
    if type(projection) is Projection:
        return projection.fused.linear
    return projection if isinstance(projection, PackedMatrix) else None


def _matrices(layer: Any) -> list[PackedMatrix | None]:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (*(getattr(attention, f"{name}_proj") for name in "qkvo"), mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return [matrix_of(projection) for projection in projections]


def _backend_of(matrices: Sequence[PackedMatrix | None]) -> NativeBackend | None:
    """What multiplies with all of them, if that is the kernel."""
    backends = {None if matrix is None else matrix.backend for matrix in matrices}
    found = backends.pop() if len(backends) == 1 else None
    return found if isinstance(found, NativeBackend) else None


def _head_norms(attention: Any) -> list[Any]:
    return [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]


def fits_kernel(layer: Any) -> bool:
    """Whether the kernel can compute a layer of transformers' Llama, Qwen2 or Qwen3."""
    attention, config, matrices = layer.self_attn, layer.self_attn.config, _matrices(layer)
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *_head_norms(attention)]
    return (
        _backend_of(matrices) is not None
        and all(matrix.out_features % native.TILE_ROWS == 0 for matrix in matrices if matrix is not None)
        and config.hidden_act == "silu"
        and attention.head_dim % native.TILE_ROWS == 0
        and attention.head_dim <= _MOST_HEAD_DIM
        and attention.num_key_value_groups <= _MOST_GROUPS
        and len(norms) in (2, 4)
        and len({norm.variance_epsilon for norm in norms}) == 1
        and getattr(attention, "sliding_window", None) is None
    )


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
    most = num_rows * (num_queries + 2)
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
