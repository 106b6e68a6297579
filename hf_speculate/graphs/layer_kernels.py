"""Small kernels in Triton for what a decoder layer computes between its matrices: norm, rotation, gate.

PyTorch launches eight kernels for an RMSNorm, ten for a rotation of queries and keys, and two for a gate. Each takes
two microseconds of a GPU, whatever its size. In a captured round of a small model that is most of the time.

They round where PyTorch does: every intermediate value that it would store in 16 bit is rounded here, too. Only the sum
of a norm is added up in another order. The plain references are the modules of transformers (`fused`).
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..triton_support import check_operands, power_of_two


tl: Any = None  # triton.language, once a kernel is wanted: importing it takes a second

_GATE_BLOCK = 1024
# A product and a sum in one instruction would be rounded once.
_EXACT = {"enable_fp_fusion": False}
# Numbers that change with the tree; a kernel specialised for each would be compiled again and again.
_VARYING = ("count", "batch", "out_batch", "table_batch")


def rms_norm(
    states: Float[Tensor, "*N H"], weight: Float[Tensor, " H"], eps: float, *, rounds_once: bool = False
) -> Float[Tensor, "*N H"]:
    """`weight * (states / rms(states))`. The quotient is rounded to the dtype of the states first, as in Llama's norm;
    or only the result is, as in `nn.RMSNorm`."""
    size = states.shape[-1]
    rows, weight = states.contiguous().view(-1, size), weight.contiguous()
    check_operands(states.device, (weight, (size,), None))
    outputs = torch.empty_like(rows)
    with torch.cuda.device_of(states):
        sizes = {"BLOCK": power_of_two(size), "ROUNDS_ONCE": rounds_once}
        _kernels()["norm"][(len(rows),)](rows, weight, outputs, size, eps, **sizes, num_warps=8, **_EXACT)
    return outputs.view(states.shape)


def rotated(
    states: Float[Tensor, "B H N D"], cos: Float[Tensor, "B N D"], sin: Float[Tensor, "B N D"]
) -> Float[Tensor, "B H N D"]:
    """`states * cos + rotate_half(states) * sin`, in the layout of `states`."""
    batch_size, num_heads, count, size = states.shape
    outputs, (cos, sin) = torch.empty_like(states), (each.contiguous() for each in (cos, sin))
    table = (1 if len(cos) == 1 else batch_size, count, size - size % 2)
    check_operands(states.device, (cos, table, None), (sin, table, None))
    with torch.cuda.device_of(states):
        _kernels()["rotate"][(batch_size * count, num_heads)](
            *(states, cos, sin, outputs, count, *states.stride(), *outputs.stride()),
            # the prompt's positions may be shared by all rows
            *(0 if len(cos) == 1 else count, size // 2),
            BLOCK=power_of_two(size // 2),
            num_warps=1,
            **_EXACT,
        )
    return outputs


def gated(gate: Float[Tensor, "*N H"], up: Float[Tensor, "*N H"]) -> Float[Tensor, "*N H"]:
    """`silu(gate) * up`."""
    gate, up = gate.contiguous(), up.contiguous()
    check_operands(gate.device, (up, gate.shape, None))
    outputs, count = torch.empty_like(gate), gate.numel()
    with torch.cuda.device_of(gate):
        _kernels()["gate"][(-(-count // _GATE_BLOCK),)](
            gate, up, outputs, count, BLOCK=_GATE_BLOCK, num_warps=4, **_EXACT
        )
    return outputs


@cache
def _kernels() -> dict[str, Any]:
    global tl
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
    rotate = triton.jit(_rotate, do_not_specialize=_VARYING)
    return {"norm": triton.jit(_norm), "rotate": rotate, "gate": triton.jit(_gate)}


def _norm(rows, weight, outputs, size, eps, BLOCK: tl.constexpr, ROUNDS_ONCE: tl.constexpr):  # type: ignore
    """One row."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_column = columns < size
    values = tl.load(rows + row * size + columns, mask=is_column, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) / size + eps)
    normed = values * factor
    if not ROUNDS_ONCE:
        normed = normed.to(rows.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(outputs + row * size + columns, (scale * normed).to(outputs.dtype.element_ty), mask=is_column)


def _rotate(
    states, cos, sin, outputs, count,
    batch, head, node, dim, out_batch, out_head, out_node, out_dim,  # strides
    table_batch, half, BLOCK: tl.constexpr,  # type: ignore
):  # fmt: skip
    """One node in one head. `table_batch` is the number of rows of a table for each row of the batch."""
    row, which = tl.program_id(0), tl.program_id(1)
    number, place = row // count, row % count
    columns = tl.arange(0, BLOCK)
    is_column = columns < half
    dtype = states.dtype.element_ty
    source = states + number * batch + which * head + place * node
    first = tl.load(source + columns * dim, mask=is_column, other=0.0).to(tl.float32)
    second = tl.load(source + (columns + half) * dim, mask=is_column, other=0.0).to(tl.float32)
    table = (number * table_batch + place) * 2 * half + columns
    target = outputs + number * out_batch + which * out_head + place * out_node
    for part in tl.static_range(2):
        angle = table + part * half
        along = tl.load(cos + angle, mask=is_column, other=0.0).to(tl.float32)
        across = tl.load(sin + angle, mask=is_column, other=0.0).to(tl.float32)
        if part:
            kept, turned = second, first
        else:
            kept, turned = first, -second
        # Each product is a tensor of its own in PyTorch.
        total = (kept * along).to(dtype).to(tl.float32) + (turned * across).to(dtype).to(tl.float32)
        tl.store(target + (columns + part * half) * out_dim, total.to(dtype), mask=is_column)


def _gate(gate, up, outputs, count, BLOCK: tl.constexpr):  # type: ignore
    """One block of values."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_value = places < count
    dtype = gate.dtype.element_ty
    values = tl.load(gate + places, mask=is_value, other=0.0).to(tl.float32)
    opened = (values / (1.0 + tl.exp(-values))).to(dtype).to(tl.float32)
    product = opened * tl.load(up + places, mask=is_value, other=0.0).to(tl.float32)
    tl.store(outputs + places, product.to(dtype), mask=is_value)
