"""Layers of packed hybrids (Qwen3.5): delta nets between their projections, and attention, in a native call each.

The kernel computes token after token. So the bits of a token do not depend on how many are verified together, and some
tokens take little more time than one. transformers' modules compute a text in chunks, and single tokens in another way;
they are the plain reference. The ctypes structures mirror `kernel/delta.h` and `kernel/layer.h`.
"""

from __future__ import annotations

import ctypes
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_speculate.compatibility.stock import RECURRENT_LAYERS
from hf_speculate.target import GenerativeModel

from . import binding
from .backends import NativeBackend
from .layers import MOST_ROWS, VisibleRanges, addresses_of_ranges
from .memory import address_of, address_of_strided, check_range
from .modules import PackedMatrix, Projection
from .refusals import Refused
from .rows import attention_ranges
from .weights import fields


# Classes whose computation is known, and the widest convolution (the kernel's WIDEST).
_NETS, _ATTENTIONS = ("Qwen3_5GatedDeltaNet",), ("Qwen3_5Attention",)
_MOST_WIDTH = 8

_ATTENTION = "hf_speculate_packed"  # name of `_attend` in transformers' table

# Attention modules in which the kernel attends; copies of them are not among them.
_attending: WeakSet[nn.Module] = WeakSet()


def run_hybrid_layers(model: GenerativeModel) -> None:
    """Lets the kernel compute the delta nets of a packed model, and attend in its other layers, if it knows them."""
    decoder: Any = model.get_decoder()
    nets = [layer.linear_attn for layer in decoder.layers if hasattr(layer, "linear_attn")]
    if not nets or not all(type(net).__name__ in _NETS and _is_packed(net) and _fits(net) for net in nets):
        return
    for net in nets:
        net.forward = DeltaForward(net)
    for attention in (layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn")):
        if type(attention).__name__ in _ATTENTIONS and attention.head_dim % binding.TILE_COLUMNS == 0:
            attention.config = AttendingConfig(attention.config)
            _attending.add(attention)


class AttendingConfig:
    """A model's config as its attention modules see it: `_attend` stands in for SDPA, while the model asks for that."""

    def __init__(self, config: Any):
        self._config = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copying asks for, before there is a config
            raise AttributeError(name)
        return getattr(self._config, name)

    @property
    def _attn_implementation(self) -> str | None:
        chosen = self._config._attn_implementation
        return _ATTENTION if chosen == "sdpa" else chosen


class DeltaForward:
    """The `forward` of a delta net. In a copy of the model, the modules compute."""

    def __init__(self, net: Any, is_native: bool = True):
        self._net, self._is_native = net, is_native

    def __getstate__(self):
        return {"_net": self._net, "_is_native": False}

    def __call__(
        self,
        hidden_states: Float[Tensor, "B N H"],
        attention_mask: Int[Tensor, "B N"] | None = None,
        cache: Cache | None = None,
        cache_params: Cache | None = None,
        **others: Any,
    ) -> Float[Tensor, "B N H"]:
        """Runs the net natively if possible; see `Qwen3_5GatedDeltaNet.forward`. (Before transformers 5.24 the cache is
        called `cache_params`.)"""
        given: Any = cache_params if cache is None else cache
        if given is not None:
            given.layers[self._net.layer_idx].replay = None
        if self._takes(hidden_states, given) and others.get("cu_seq_lens_q") is None:
            return self._run(hidden_states, attention_mask, given)
        named = {"cache": cache} if cache_params is None else {"cache_params": cache_params}
        return type(self._net).forward(self._net, hidden_states, attention_mask=attention_mask, **named, **others)

    def _takes(self, hidden: Tensor, cache: Cache | None) -> bool:
        """Whether the kernel can compute these states with this cache."""
        net = self._net
        weights = net.conv1d.weight, net.A_log, net.dt_bias
        if not self._is_native or not _are_readable(hidden, *weights) or not all(map(Tensor.is_contiguous, weights)):
            return False
        layer: Any = None if cache is None else cache.layers[net.layer_idx]
        return layer is None or (type(layer) in RECURRENT_LAYERS and not layer.record_past and _suits(layer, hidden))

    def _run(self, hidden: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        net = self._net
        if mask is not None:
            hidden = (hidden * mask[:, :, None]).to(hidden.dtype)
        mixed, gates = net.in_proj_qkv(hidden), net.in_proj_z(hidden)
        strengths, steps = _alike(net.in_proj_b(hidden), net.in_proj_a(hidden))
        batch_size, num_tokens, _ = hidden.shape
        outputs = hidden.new_empty(batch_size, num_tokens, net.num_v_heads, net.head_v_dim)
        before = self._states(hidden, cache)
        _advance(net, (mixed, strengths, steps), before, num_tokens, outputs)
        if cache is not None and batch_size * num_tokens <= MOST_ROWS:  # those of a prompt are large, and never wanted
            layer: Any = cache.layers[net.layer_idx]
            layer.replay = Replay(net, (mixed, strengths, steps), before)
        normed = net.norm(outputs.view(-1, net.head_v_dim), gates.reshape(-1, net.head_v_dim))
        return net.out_proj(normed.view(batch_size, num_tokens, -1))

    def _states(self, hidden: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """The last inputs of the convolution and the recurrent states, which the kernel advances: the cache's own. A
        layer that has seen nothing gets zeros, which are what precedes a text."""
        net, size = self._net, len(hidden)
        if cache is not None and cache.has_previous_state(net.layer_idx):
            layer: Any = cache.layers[net.layer_idx]
            return layer.conv_states[0], layer.recurrent_states[0]
        inputs = hidden.new_zeros(size, net.conv_dim, net.conv_kernel_size)
        states = torch.zeros(size, net.num_v_heads, net.head_k_dim, net.head_v_dim, dtype=torch.float32, device="cpu")
        if cache is None:
            return inputs, states
        cache.update_conv_state(inputs, net.layer_idx)
        cache.update_recurrent_state(states, net.layer_idx)
        return self._states(hidden, cache)


class Replay:
    """The last forward of a delta net on one cache, to advance the states by a part of its tokens (`RecurrentCache`).

    Args:
        inputs: outputs of the net's input projections: queries, keys and values; b; a.
        states: the cache's states, which a forward writes in place.
    """

    def __init__(self, net: Any, inputs: tuple[Tensor, Tensor, Tensor], states: tuple[Tensor, Tensor]):
        self._net, self._inputs, self._states = net, inputs, states

    def __call__(self, count: int) -> None:
        """Advances states that were put back to what they were before, by the first `count` tokens."""
        _advance(self._net, self._inputs, self._states, count)

    def __reduce__(self):
        """A copy of a cache has no forward to repeat."""
        return type(None), ()


def _advance(
    net: Any,
    inputs: tuple[Tensor, Tensor, Tensor],
    states: tuple[Tensor, Tensor],
    count: int,
    outputs: Tensor | None = None,
) -> None:
    """Advances the states of a net by the first `count` tokens [B, N], and writes their outputs."""
    (mixed, strengths, steps), (last, recurrent), sizes = inputs, states, _sizes(net)
    dtype, (batch_size, row_tokens, _) = mixed.dtype, mixed.shape
    check_range("the number of tokens", count, 0, row_tokens)
    heads, key_size, value_size = sizes["value_heads"], sizes["key_size"], sizes["value_size"]
    channels = 2 * sizes["key_heads"] * key_size + heads * value_size

    def of_tokens(tensor: Tensor, width: int, stride: int) -> int:
        """The address of a vector for each token; tokens of all texts lie `stride` values apart."""
        return address_of_strided(tensor, dtype, (batch_size, row_tokens, width), (row_tokens * stride, stride, 1))

    delta = _DeltaStructure(
        mixed=of_tokens(mixed, channels, mixed.stride(1)),
        strengths=of_tokens(strengths, heads, strengths.stride(1)),
        steps=of_tokens(steps, heads, strengths.stride(1)),
        mixed_stride=mixed.stride(1),
        head_stride=strengths.stride(1),
        row_tokens=row_tokens,
        kernel=address_of(net.conv1d.weight, dtype, (channels, 1, sizes["width"])),
        log_rates=address_of(net.A_log, dtype, (heads,)),
        time_steps=address_of(net.dt_bias, dtype, (heads,)),
        inputs=address_of(last, dtype, (batch_size, channels, sizes["width"])),
        states=address_of(recurrent, torch.float32, (batch_size, heads, key_size, value_size)),
        y=0 if outputs is None else address_of(outputs, dtype, (batch_size, count, heads, value_size)),
        batch_size=batch_size,
        num_tokens=count,
        **sizes,
        is_bf16=mixed.dtype is torch.bfloat16,
        threads=torch.get_num_threads(),
    )
    if not binding.library().run_delta(ctypes.addressof(delta)):
        raise MemoryError(f"Out of memory: {len(mixed) * count} tokens of a delta net.")


def _attend(
    module: nn.Module,
    query: Float[Tensor, "B heads N d"],
    key: Float[Tensor, "B KV S d"],
    value: Float[Tensor, "B KV S d"],
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **others: Any,
) -> tuple[Float[Tensor, "B N heads d"], None]:
    """Attention of a packed hybrid: by the kernel for as many rows as in other packed models, else by SDPA."""
    batch_size, heads, num_queries, head_dim = query.shape
    num_keys = key.shape[2]
    try:
        ranges = _readable_ranges(module, query, key, value, attention_mask)
    except Refused:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    queries, dtype = query.transpose(1, 2).contiguous(), query.dtype
    of_entries = (batch_size, key.shape[1], num_keys, head_dim), (*key.stride()[:2], head_dim, 1)
    # Cells of 32 columns lie together, as in the inputs of products.
    outputs = query.new_empty(heads * head_dim // binding.TILE_COLUMNS, batch_size * num_queries, binding.TILE_COLUMNS)
    call = _AttentionStructure(
        queries=address_of(queries, dtype, (batch_size, num_queries, heads, head_dim)),
        keys=address_of_strided(key, dtype, *of_entries),
        values=address_of_strided(value, dtype, *of_entries),
        y=address_of(outputs, dtype, outputs.shape),
        batch_stride=key.stride(0),
        head_stride=key.stride(1),
        batch_size=batch_size,
        num_queries=num_queries,
        num_keys=num_keys,
        heads=heads,
        kv_heads=key.shape[1],
        head_dim=head_dim,
        is_bf16=dtype is torch.bfloat16,
        threads=torch.get_num_threads(),
        scale=scaling,
    )
    if ranges is not None:
        call.offsets, call.ranges = addresses_of_ranges(ranges, batch_size * num_queries)
    if not binding.library().attend(ctypes.addressof(call)):
        raise MemoryError(f"Out of memory: {batch_size * num_queries} rows after {num_keys} cached tokens.")
    return outputs.transpose(0, 1).reshape(batch_size, num_queries, heads, head_dim), None


def _readable_ranges(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> VisibleRanges:
    """The visible ranges of queries; None if all entries up to its own are visible to each.

    Raises:
        Refused: the kernel cannot compute this attention.
    """
    batch_size, _, num_queries, head_dim = query.shape
    if module not in _attending or batch_size * num_queries > MOST_ROWS or not _are_readable(query, key, value):
        raise Refused("states of another form, or too many")
    if key.stride() != value.stride() or key.stride()[2:] != (head_dim, 1):
        raise Refused("entries that are not contiguous")
    return attention_ranges(mask, (batch_size, num_queries), key.shape[2])


AttentionInterface.register(_ATTENTION, _attend)


@binding.mirrors("Delta")
class _DeltaStructure(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "mixed", "strengths", "steps"),
        *fields(ctypes.c_int64, "mixed_stride", "head_stride", "row_tokens"),
        *fields(ctypes.c_void_p, "kernel", "log_rates", "time_steps", "inputs", "states", "y"),
        *fields(ctypes.c_int64, "batch_size", "num_tokens", "key_heads", "value_heads", "key_size", "value_size"),
        *fields(ctypes.c_int64, "width", "is_bf16", "threads"),
    ]


@binding.mirrors("AttentionCall")
class _AttentionStructure(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "queries", "keys", "values", "y", "offsets", "ranges"),
        *fields(ctypes.c_int64, "batch_stride", "head_stride", "batch_size", "num_queries", "num_keys"),
        *fields(ctypes.c_int64, "heads", "kv_heads", "head_dim", "is_bf16", "threads"),
        ("scale", ctypes.c_double),
    ]


def _sizes(net: Any) -> dict[str, int]:
    return {
        "key_heads": net.num_k_heads,
        "value_heads": net.num_v_heads,
        "key_size": net.head_k_dim,
        "value_size": net.head_v_dim,
        "width": net.conv_kernel_size,
    }


def _fits(net: Any) -> bool:
    """Whether the kernel can compute a net of these sizes."""
    sizes, lanes = _sizes(net), binding.TILE_ROWS
    is_even = sizes["key_size"] % lanes == 0 and sizes["value_size"] % lanes == 0
    return is_even and sizes["width"] <= _MOST_WIDTH and net.activation == "silu" and net.conv1d.bias is None


def _is_packed(net: Any) -> bool:
    matrices = [part.fused.linear if isinstance(part, Projection) else part for part in net.children()]
    return any(isinstance(matrix, PackedMatrix) and isinstance(matrix.backend, NativeBackend) for matrix in matrices)


def _are_readable(*tensors: Tensor) -> bool:
    """Whether the kernel can read tensors: on the CPU, of one dtype that it knows and that products of theirs have, and
    with no gradient to find."""
    dtype = tensors[0].dtype
    return (
        not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and dtype in binding.DENSE_KINDS
        and all(tensor.is_cpu and tensor.dtype is dtype for tensor in tensors)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )


def _suits(layer: Any, hidden: Tensor) -> bool:
    """Whether the states of a cache's layer, if it has some, are as the kernel keeps them."""
    inputs, states = layer.conv_states[0], layer.recurrent_states[0]
    if inputs is None or states is None:
        return inputs is None and states is None
    kinds = (inputs, hidden.dtype), (states, torch.float32)
    return all(tensor.is_cpu and tensor.is_contiguous() and tensor.dtype is kind for tensor, kind in kinds)


def _alike(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors with the same strides; parts of one product have those of the product."""
    return (first, second) if first.stride() == second.stride() else (first.contiguous(), second.contiguous())
