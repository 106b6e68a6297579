"""Decoder layers in the form for the kernel, and the entries visible to their queries.

The ctypes structures mirror `kernel/layer.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from . import binding
from .layer_parts import LayerParts, matrix_of
from .memory import address_of, address_of_strided, check_range
from .modules import Projection
from .refusals import UNREADABLE_MASK, Refused
from .weights import MatrixStructure, WeightsInPlace, fields, fill_matrix


# Largest number of rows in one kernel call (its CHUNK).
MOST_ROWS = 128

# Most visible ranges of a query, in addition to one for each other query: earlier ancestors and contiguous pieces.
_MOST_RANGES = 32

# RMSNorms of a layer, in the order of the structure.
_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "second_norm", "attention_post_norm", "mlp_post_norm")

# Types of layers in one call: those to which everything is visible, and those with a window.
NUM_TYPES = 2

_MASK_KINDS = {torch.bool: 0, torch.float32: 1, torch.bfloat16: 2}


@binding.mirrors("Layer")
class _LayerStructure(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_int64, "hidden", "heads", "kv_heads", "head_dim", "inner"),
        *fields(ctypes.c_int64, "q_at", "k_at", "v_at", "gate_at", "up_at"),
        *fields(ctypes.c_double, "eps", "scale"),
        *fields(ctypes.c_void_p, *_NORMS),
        ("norm_shift", ctypes.c_double),
        *fields(ctypes.c_int64, "gelu", "type", "joins", "norms_residual"),
        *((name, MatrixStructure * most) for name, most in (("qkv", 3), ("output", 1), ("gate_up", 2), ("down", 1))),
    ]


@binding.mirrors("Call")
class CallStructure(ctypes.Structure):
    """`Call` of the kernel."""

    kept: Any  # objects that the structure points to, kept alive
    num_texts: int  # number of texts that the cache has memory for
    capacity: int  # number of entries that it has memory for in each text
    _fields_ = [
        *fields(ctypes.c_void_p, "x", "second", "y"),
        *fields(ctypes.c_int64, "num_layers"),
        *fields(ctypes.c_void_p, "layers"),
        *fields(ctypes.c_int64, "batch_size", "num_queries", "num_keys"),
        *fields(ctypes.c_void_p * NUM_TYPES, "cos", "sin"),
        *fields(ctypes.c_int64, "rotary_stride"),
        *fields(ctypes.c_void_p, "keys", "values", "batch_strides", "head_strides"),
        *fields(ctypes.c_void_p * NUM_TYPES, "offsets", "ranges"),
        *fields(ctypes.c_int64 * NUM_TYPES, "windows"),
        *fields(ctypes.c_int64, "is_bf16", "quantize", "threads"),
    ]

    def check_rows(self, batch_size: int, num_queries: int, num_keys: int) -> None:
        """Raises `WrongBufferError` unless the cache has memory for these texts, with the entries of their queries."""
        check_range("the number of texts", batch_size, 1, self.num_texts)
        check_range("the number of entries", num_keys, num_queries, self.capacity)
        check_range("the number of rows", batch_size * num_queries, 1, MOST_ROWS)

    def set_visible_ranges(self, visible_ranges: Sequence[VisibleRanges], num_rows: int) -> None:
        """Sets the visible ranges of queries, for each type of layer (`NativeLayers.run`)."""
        for number, ranges in enumerate(visible_ranges):
            if ranges is not None:
                self.offsets[number], self.ranges[number] = addresses_of_ranges(ranges, num_rows)


VisibleRanges = tuple[Tensor, Tensor] | None
"""Ranges of the entries visible to each query (`ranges_of_mask`). None: all up to its own, or those of its window."""


def addresses_of_ranges(visible_ranges: tuple[Tensor, Tensor], num_rows: int) -> tuple[int, int]:
    """The addresses of the offsets and of the visible ranges of this many queries."""
    offsets, ranges = visible_ranges
    return address_of(offsets, torch.int32, (num_rows + 1,)), address_of(ranges, torch.int32, (len(ranges), 2))


class Entries(NamedTuple):
    """The entries of one layer in a cache.

    Attributes:
        keys, values: [B, KV, capacity, D], entries contiguous.
        origin: index in the text of their first entry.
    """

    keys: Tensor
    values: Tensor
    origin: int = 0

    @property
    def capacity(self) -> int:
        """The number of entries of a text up to the end of the memory."""
        return self.origin + self.keys.shape[2]

    def addresses(self, dtype: torch.dtype, heads: tuple[int, int]) -> tuple[int, int]:
        """The addresses that the text's first key and value would have.

        Args:
            heads: number of KV heads, and their size.
        """
        (batch_size, _, capacity, _), (kv_heads, size) = self.keys.shape, heads
        shape, strides = (batch_size, kv_heads, capacity, size), (*self.keys.stride()[:2], size, 1)
        skipped = self.origin * size * dtype.itemsize
        keys, values = (address_of_strided(states, dtype, shape, strides) for states in (self.keys, self.values))
        return keys - skipped, values - skipped


class NativeLayer:
    """The weights of one decoder layer at their present addresses, in the kernel's structure at `address`."""

    def __init__(self, parts: LayerParts, dtype: torch.dtype):
        sizes, self._dtype = parts.sizes, dtype
        widths = {"q_norm": sizes["head_dim"], "k_norm": sizes["head_dim"]}
        norms = {
            name: address_of(norm.weight, dtype, (widths.get(name, sizes["hidden"]),))
            for name, norm in parts.norms.items()
        }
        self._layer = _LayerStructure(
            **sizes,
            eps=parts.eps,
            scale=parts.scale,
            **norms,
            norm_shift=parts.norm_shift,
            gelu=parts.gelu,
            type=parts.window is not None,
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
        """Places matrices with the same input in the order of first use; their outputs lie side by side."""
        columns: dict[nn.Module, int] = {}
        width = 0
        for field, projection in projections.items():
            matrix = matrix_of(projection)
            assert matrix is not None
            if matrix not in columns:
                fill_matrix(places[len(columns)], matrix, self._dtype)
                columns[matrix] = width
                width += matrix.out_features
            if field:
                before = projection.fused.sizes[: projection.index] if isinstance(projection, Projection) else ()
                setattr(self._layer, field, columns[matrix] + sum(before))


class NativeLayers:
    """The layers of one decoder.

    Attributes:
        dtype: dtype of states and caches.
        hidden: width of the states.
        quantizes_activations: whether inputs of packed matrices are quantised to bytes.
        heads: number of KV heads, and their size.
        windows: window of each layer (`LayerParts`).
    """

    def __init__(self, layers: Sequence[LayerParts]):
        self._weights = WeightsInPlace([module for layer in layers for module in layer.modules])
        dtype = layers[0].dtype()
        assert dtype is not None
        self.dtype = dtype
        self._layers = [NativeLayer(layer, dtype) for layer in layers]
        self._addresses = (ctypes.c_void_p * len(layers))(*(layer.address for layer in self._layers))
        self.quantizes_activations = layers[0].quantizes_activations() or False
        self.hidden = layers[0].sizes["hidden"]
        self.heads = layers[0].sizes["kv_heads"], layers[0].sizes["head_dim"]
        self.windows = [layer.window for layer in layers]
        self._window = max((window for window in self.windows if window is not None), default=0)

    @classmethod
    def of(cls, layers: Sequence[LayerParts]) -> NativeLayers:
        """The layers. Raises `Refused` if the kernel cannot compute all of them in one call."""
        for parts in layers:
            if problem := parts.problem():
                raise Refused(problem)
        if len({(parts.dtype(), parts.quantizes_activations()) for parts in layers}) != 1:
            raise Refused("layers that differ in dtype or in the way of their products")
        if (dtype := layers[0].dtype()) not in binding.DENSE_KINDS:
            raise Refused(f"weights in {dtype}; the kernel computes in {', '.join(map(str, binding.DENSE_KINDS))}")
        if len({parts.window for parts in layers} - {None}) > 1:
            raise Refused("layers with windows of several sizes")
        return cls(layers)

    def __len__(self) -> int:
        return len(self._layers)

    def is_current(self) -> bool:
        """Whether the weights are unchanged (`WeightsInPlace.are_current`)."""
        return self._weights.are_current()

    def has_gradients(self) -> bool:
        """Whether a weight requires a gradient."""
        return self._weights.have_gradients()

    def call(self, buffers: Sequence[Entries]) -> CallStructure:
        """A call structure of these layers with a cache, but no rows. It keeps alive what it points to."""
        count, strides = len(self._layers), [entries.keys.stride() for entries in buffers]
        pointers, sizes = ctypes.c_void_p * count, ctypes.c_int64 * count
        check_range("the number of layers in the cache", len(buffers), count, count)
        check_range("sizes of batches in the cache", len({len(entries.keys) for entries in buffers}), 1, 1)
        addresses = [entries.addresses(self.dtype, self.heads) for entries in buffers]
        call = CallStructure(num_layers=count, layers=ctypes.addressof(self._addresses))
        call.num_texts, call.capacity = len(buffers[0].keys), min(entries.capacity for entries in buffers)
        call.kept = (
            self,
            (
                pointers(*(keys for keys, _ in addresses)),
                pointers(*(values for _, values in addresses)),
                sizes(*(stride[0] for stride in strides)),
                sizes(*(stride[1] for stride in strides)),
            ),
        )
        call.keys, call.values, call.batch_strides, call.head_strides = map(ctypes.addressof, call.kept[1])
        call.windows[1] = self._window
        call.is_bf16, call.quantize = self.dtype is torch.bfloat16, self.quantizes_activations
        call.threads = torch.get_num_threads()
        return call

    def run(
        self,
        inputs: Float[Tensor, "B N H"],
        rotary: tuple[Float[Tensor, "R N D"], Float[Tensor, "R N D"]],
        buffers: Sequence[Entries],
        num_keys: int,
        visible_ranges: VisibleRanges,
        second: Float[Tensor, "B N H"] | None,
    ) -> Float[Tensor, "L B N H"]:
        """The outputs of every layer, all of one type. The entries of the queries are written to the cache.

        Args:
            inputs: states of the queries, contiguous, of `dtype`.
            rotary: cosines and sines, contiguous; R is B or 1.
            num_keys: number of entries including those of the queries, which are the last ones.
            second: input that joining layers put before the states, contiguous; None if no layer does.
        """
        (batch_size, num_queries, _), (cos, sin), call = inputs.shape, rotary, self.call(buffers)
        shape, is_shared = (batch_size, num_queries, self.hidden), cos.shape[0] == 1
        outputs = inputs.new_empty(len(self._layers), *inputs.shape)
        call.x = address_of(inputs, self.dtype, shape)
        call.y = address_of(outputs, self.dtype, (len(self._layers), *shape))
        call.second = None if second is None else address_of(second, self.dtype, shape)
        call.check_rows(batch_size, num_queries, num_keys)
        call.batch_size, call.num_queries, call.num_keys = batch_size, num_queries, num_keys
        call.rotary_stride = 0 if is_shared else cos.stride(0)
        of_angles = (1 if is_shared else batch_size, num_queries, self.heads[1])
        angles = address_of(cos, self.dtype, of_angles), address_of(sin, self.dtype, of_angles)
        for number in range(NUM_TYPES):
            call.cos[number], call.sin[number] = angles
        call.set_visible_ranges([visible_ranges] * NUM_TYPES, batch_size * num_queries)
        if not binding.library().run_layers(ctypes.addressof(call)):
            raise MemoryError(f"Out of memory: {batch_size * num_queries} rows after {num_keys} cached tokens.")
        return outputs


def ranges_of_mask(
    mask: Tensor, batch_size: int, num_queries: int, num_keys: int, hides_first: bool = False
) -> tuple[Tensor, Tensor]:
    """The visible ranges of each query by a mask.

    Args:
        mask: [B or 1, 1, at least N, S]; 0 or True where an entry is visible, the lowest value or False elsewhere.
            Masks from `attention.fold` work too.
        hides_first: whether a mask with fewer columns than entries hides the first of them, instead of showing them.

    Returns:
        int32 [B * N + 1], the offset of each query's ranges, and int32 [ranges, 2], the first entry and the end of each
        range.

    Raises:
        Refused: the mask has other values, or more ranges than trees need.
    """
    kind, num_rows = _MASK_KINDS.get(mask.dtype), batch_size * num_queries
    if kind is None or mask.stride(-1) != 1:
        raise Refused(UNREADABLE_MASK)
    of_rows, _, given, columns = mask.shape
    check_range("the rows of a mask", given, num_queries, 1 << 40)
    check_range("the columns of a mask", columns, 0, num_keys)
    shape = (of_rows if of_rows == 1 else batch_size, mask.shape[1], given, columns)
    address = address_of_strided(mask, mask.dtype, shape)
    most = num_rows * (min(num_queries, MOST_ROWS) + _MOST_RANGES)
    offsets, ranges = (
        torch.empty(num_rows + 1, dtype=torch.int32, device="cpu"),
        torch.empty(most, 2, dtype=torch.int32, device="cpu"),
    )
    num_ranges = binding.library().ranges_of_mask(
        address,
        kind,
        0 if mask.shape[0] == 1 else mask.stride(0),
        mask.stride(2),
        batch_size,
        num_queries,
        columns,
        num_keys,
        hides_first,
        *addresses_of_ranges((offsets, ranges), num_rows),
        most,
    )
    if num_ranges < 0:
        raise Refused("an attention mask with other values than visible and hidden, or with too many ranges")
    return offsets, ranges
