"""Attention of a draft tree after a long prefix by a Triton kernel for CUDA (flash decoding).

A tree has few nodes, and its prefix is long. With one program per KV head most of a GPU would be idle. So each program
takes one part of the keys: a split of the prefix, or the tree. A second, small kernel merges the parts by log-sum-exp.
The query heads of a KV head and the nodes are the rows of a program and share every key that it reads. Only the tree
needs a mask.

The host reads shapes only. Each program reads the lengths on the device and takes its share of the visible prefix. So a
CUDA graph can hold both kernels, and each replay uses the lengths of its moment. The first call for a dtype, head
size, layout and block of rows (16, 32 or 64) compiles for seconds: it must come before the capture. With
TRITON_INTERPRET=1 in the environment, Triton's interpreter runs the kernels on a CPU.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..triton_support import check_operands, has_triton, is_interpreting, power_of_two


# Two programs share a multiprocessor: one computes while the other waits for keys. Two of 4 warps with 255 registers
# per thread just fit.
_PROGRAMS_PER_PROCESSOR = 2
_NUM_WARPS = 4
# Bytes of the largest tile of keys or of values. A program loads the next tile of both while it computes with the last.
# An H100 reaches its full bandwidth with about 20 KB per multiprocessor on the way.
_TILE_BYTES = 16384
# Most rows of a program and keys of a tile: 64 rows are one tensor core instruction of 4 warps on an H100.
_LARGEST_BLOCK = 64
# Blocks of 16 rows are taken up to this number of them, for all pairs of a row and a KV head: an H200 then has room for
# seven splits of the prefix. They take 0.65 to 0.95 of the time of larger ones there, and compile once for many sizes.
# Each block reads all keys, so they are for buffers of which much stays in the cache of a GPU.
_FEW_BLOCKS, _SMALL_CAPACITY = 32, 4096
# Fewest keys per split: each split writes one float32 vector per row, which the second kernel reads again.
_LEAST_KEYS = 128
_BLOCK_PARTS = 16  # parts that the second kernel reads at a time

_INTEGERS = (torch.int64, torch.int32)

# Arguments that change between trees of one model: their values are not compiled into the kernels.
_VARYING = ("num_rows", "num_nodes", "num_tree", "num_kv_heads", "num_splits", "num_parts", "tree_batch")

tl: Any = None  # triton.language, set by `_kernels`; kernels look it up among the globals of their module


@dataclass(frozen=True, eq=False)
class DeviceTree:
    """Position of a draft tree in the KV buffers, and what its nodes see. All tensors are on the device.

    Entries of a row outside [starts, ends) and outside the tree are seen by no node.

    Attributes:
        starts: first visible prefix entry of each row, after its left padding.
        ends: end of each row's visible prefix (its committed length). Entries from here to `base` are holes.
        base: index of node 0 in the buffers.
        ancestors: `ancestors[r, i, j]` is True if the i-th query sees node j, its own node included. R is 1 (all rows
            share the tree) or B; N < T where only the last N nodes are run, as in a level of a draft.
    """

    starts: Int[Tensor, " B"]
    ends: Int[Tensor, " B"]
    base: Int[Tensor, ""] | Int[Tensor, " 1"]
    ancestors: Bool[Tensor, "R N T"]


def has_kernel() -> bool:
    """Whether `tree_attention` can run here. It needs Triton, and a GPU with bfloat16 (from 8.0) or the interpreter."""
    return has_triton() and (is_interpreting() or torch.cuda.get_device_capability() >= (8, 0))


def num_splits(batch_size: int, num_kv_heads: int, num_blocks: int, capacity: int, num_processors: int = 132) -> int:
    """Number of splits of the prefix: enough programs for all multiprocessors, but at least 128 entries per split.

    It depends on shapes alone, so a captured kernel fits every length.

    Args:
        batch_size, num_kv_heads, capacity: shape of the KV buffers.
        num_blocks: blocks of query rows per KV head.
        num_processors: multiprocessors of the GPU; an H100 has 132.
    """
    num_programs = _PROGRAMS_PER_PROCESSOR * num_processors // (batch_size * num_kv_heads * num_blocks)
    return max(1, min(num_programs - 1, capacity // _LEAST_KEYS))  # one program is left for the tree


def tree_attention(
    query: Float[Tensor, "B H N D"],
    keys: Float[Tensor, "B KV M D"],
    values: Float[Tensor, "B KV M D"],
    place: DeviceTree,
    scale: float | None = None,
) -> Float[Tensor, "B N H D"]:
    """Attention of the nodes of a tree, computed by the kernel. It reads no tensor on the host.

    Args:
        query: queries of the nodes (float32, bfloat16 or float16). The last dimension of all three is contiguous.
        keys: key buffer; node j is already at `place.base + j`.
        values: value buffer, likewise.
        place: position of the tree, and what its nodes see.
        scale: factor of the scores; None for D**-0.5.

    Returns:
        Contiguous outputs in the dtype of `query`.
    """
    batch_size, num_heads, num_nodes, head_dim = query.shape
    (num_kv_heads, capacity), num_tree = keys.shape[1:3], place.ancestors.shape[2]
    if {query.stride(-1), keys.stride(-1), values.stride(-1)} != {1}:
        raise ValueError("The last dimension of query, keys and values must be contiguous.")
    entries, batches = (batch_size, num_kv_heads, capacity, head_dim), (batch_size,)
    trees = (1 if len(place.ancestors) == 1 else batch_size, num_nodes, num_tree)
    check_operands(
        query.device,
        *((keys, entries, None), (values, entries, None)),
        *((place.starts, batches, _INTEGERS), (place.ends, batches, _INTEGERS)),
        *((place.base.view(-1), (1,), _INTEGERS), (place.ancestors, trees, (torch.bool,))),
    )
    num_rows = num_heads // num_kv_heads * num_nodes
    num_pairs = batch_size * num_kv_heads
    are_small = capacity <= _SMALL_CAPACITY and num_pairs * -(-num_rows // 16) <= _FEW_BLOCKS
    block_rows, block_keys, block_dim = _blocks(num_rows, head_dim, query.dtype, are_small)
    num_blocks = -(-num_rows // block_rows)
    splits = num_splits(batch_size, num_kv_heads, num_blocks, capacity, _num_processors(query.device))
    num_parts = splits + 1
    maxima = query.new_empty(num_pairs, num_parts, num_rows, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    partials = query.new_empty(num_pairs, num_parts, num_rows, head_dim, dtype=torch.float32)
    outputs = query.new_empty(batch_size, num_nodes, num_heads, head_dim)
    attend, merge = _kernels()
    factor = tl.float32 if is_interpreting() else getattr(tl, str(query.dtype).removeprefix("torch."))
    sizes = {"HEAD_DIM": head_dim, "BLOCK_DIM": block_dim, "num_warps": _NUM_WARPS}
    with torch.cuda.device_of(query):  # Triton launches on the current device
        attend[(num_blocks, num_parts, num_pairs)](
            *(query, keys, values, place.starts.contiguous(), place.ends.contiguous(), place.base),
            *(place.ancestors.contiguous().view(torch.uint8), maxima, sums, partials),
            (head_dim**-0.5 if scale is None else scale) * math.log2(math.e),
            *(num_rows, num_nodes, num_tree, num_kv_heads, splits),
            *(*query.stride()[:3], *keys.stride()[:3], *values.stride()[:3]),
            0 if place.ancestors.shape[0] == 1 else num_nodes * num_tree,
            **(sizes | {"BLOCK_ROWS": block_rows, "BLOCK_KEYS": block_keys, "FACTOR": factor}),
        )
        numbers = (num_rows, num_nodes, num_kv_heads, num_parts)
        merge[(num_rows, num_pairs)](maxima, sums, partials, outputs, *numbers, BLOCK_PARTS=_BLOCK_PARTS, **sizes)
    return outputs


def plain_tree_attention(
    query: Float[Tensor, "B H N D"],
    keys: Float[Tensor, "B KV M D"],
    values: Float[Tensor, "B KV M D"],
    place: DeviceTree,
    scale: float | None = None,
) -> Float[Tensor, "B N H D"]:
    """The same as `tree_attention` in plain PyTorch, on any device and in any dtype; float64 is computed in float64."""
    num_kv_heads, capacity, head_dim = keys.shape[1:]
    num_tree = place.ancestors.shape[2]
    entries = torch.arange(capacity, device=keys.device, dtype=torch.long)
    nodes = entries - place.base
    is_node = (nodes >= 0) & (nodes < num_tree)
    in_tree = place.ancestors[:, :, nodes.clamp(0, num_tree - 1)] & is_node
    in_prefix = (entries >= place.starts[:, None]) & (entries < place.ends[:, None])
    seen = (in_tree | in_prefix[:, None])[:, None, None]
    dtype = torch.promote_types(query.dtype, torch.float32)
    queries = query.to(dtype).unflatten(1, (num_kv_heads, -1))
    scores = torch.einsum("bkgnd,bkmd->bkgnm", queries, keys.to(dtype))
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    # NaN times a weight of zero is NaN: set such values to 0, and spoil the nodes that see them by their scores.
    is_finite = values.isfinite()
    scores = scores.masked_fill(~is_finite.all(-1)[:, :, None, None], math.nan).masked_fill(~seen, -math.inf)
    clean = values.to(dtype).masked_fill(~is_finite, 0.0)
    outputs = torch.einsum("bkgnm,bkmd->bnkgd", scores.softmax(-1), clean)
    return outputs.flatten(2, 3).to(query.dtype).contiguous()


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _blocks(num_rows: int, head_dim: int, dtype: torch.dtype, are_small: bool) -> tuple[int, int, int]:
    """Rows of a program, keys of a tile, and padded head size."""
    block_dim = max(16, power_of_two(head_dim))  # tensor cores need 16
    if dtype == torch.float32:  # exact products take no tensor cores: smaller blocks stay in registers
        return 16, max(16, _TILE_BYTES // 8 // block_dim), block_dim
    block_keys = min(_TILE_BYTES // 2 // block_dim, _LARGEST_BLOCK)
    return 16 if are_small else min(max(16, power_of_two(num_rows)), _LARGEST_BLOCK), block_keys, block_dim


@cache
def _kernels() -> tuple[Any, Any]:
    """Both kernels. The first call imports Triton and decides whether to interpret them."""
    global tl
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
    return triton.jit(_attend, do_not_specialize=_VARYING), triton.jit(_merge, do_not_specialize=_VARYING)


def _attend(
    query, keys, values, starts, ends, base, ancestors, maxima, sums, partials,
    scale, num_rows, num_nodes, num_tree, num_kv_heads, num_splits,
    query_batch, query_head, query_node, key_batch, key_head, key_entry,  # strides
    value_batch, value_head, value_entry, tree_batch,  # strides
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,  # type: ignore
    BLOCK_KEYS: tl.constexpr, FACTOR: tl.constexpr,  # type: ignore
):  # fmt: skip
    """Attention of one block of rows to one part of the keys: a split of the prefix or, as the last part, the tree.

    Row `group * num_nodes + node` is one node in one query head. The results of a row are its maximum (-inf if it sees
    no key of this part), the sum of its weights, and its weighted sum of values. FACTOR is the dtype of the products:
    that of the query, but float32 in the interpreter, which cannot multiply bfloat16.
    """
    part = tl.program_id(1)
    pair = tl.program_id(2).to(tl.int64)  # offsets in large buffers exceed 32 bits
    batch, head = pair // num_kv_heads, pair % num_kv_heads
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    nodes = rows % num_nodes
    columns, dims = tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    heads = head * (num_rows // num_nodes) + rows // num_nodes
    places = query + batch * query_batch + heads * query_head + nodes * query_node
    queries = tl.load(places[:, None] + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0).to(FACTOR)
    keys += batch * key_batch + head * key_head
    values += batch * value_batch + head * value_head
    ancestors += batch * tree_batch

    start, end = tl.load(starts + batch).to(tl.int32), tl.load(ends + batch).to(tl.int32)
    share = (end - start + num_splits * BLOCK_KEYS - 1) // (num_splits * BLOCK_KEYS) * BLOCK_KEYS
    maximum = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    weighted = tl.full([BLOCK_ROWS, BLOCK_DIM], 0.0, tl.float32)
    for is_tree in tl.static_range(2):  # two loops from one source; each program runs one of them
        if is_tree:
            first = tl.load(base).to(tl.int32)
            last = first + tl.where(part == num_splits, num_tree, 0)
        else:
            first = start + part * share
            last = tl.minimum(first + share, end)  # not above `first` in the tree's program
        # Loads of the prefix run one tile ahead (two stages). A tree has one or two tiles.
        for entry in tl.range(first, last, BLOCK_KEYS, num_stages=2 - is_tree):
            is_key = entry + columns < last
            is_cell = is_key[:, None] & is_dim[None, :]
            entries = (entry + columns).to(tl.int64)[:, None]
            key = tl.load(keys + entries * key_entry + dims[None, :], mask=is_cell, other=0.0).to(FACTOR)
            value = tl.load(values + entries * value_entry + dims[None, :], mask=is_cell, other=0.0).to(FACTOR)
            scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
            seen = is_key[None, :]
            if is_tree:
                # NaN times a weight of zero is NaN. Such values become 0, and the nodes that see them get NaN scores.
                is_finite = tl.abs(value) < float("inf")
                value = tl.where(is_finite, value, 0.0)
                is_spoiled = tl.max(tl.where(is_finite, 0, 1), 1) != 0
                scores = tl.where(is_spoiled[None, :], float("nan"), scores)
                cells = nodes[:, None] * num_tree + (entry - first + columns)[None, :]
                seen = seen & (tl.load(ancestors + cells, mask=seen, other=0) != 0)
            scores = tl.where(seen, scores, float("-inf"))
            new = tl.maximum(maximum, tl.max(scores, 1))
            shift = tl.where(new == float("-inf"), 0.0, new)  # -inf minus -inf is NaN
            weights = tl.exp2(scores - shift[:, None])
            old = tl.exp2(maximum - shift)
            total = total * old + tl.sum(weights, 1)
            weights = weights.to(query.dtype.element_ty).to(FACTOR)
            weighted = tl.dot(weights, value, weighted * old[:, None], input_precision="ieee")
            maximum = new

    results = (pair * (num_splits + 1) + part) * num_rows + rows
    tl.store(maxima + results, maximum, mask=is_row)
    tl.store(sums + results, total, mask=is_row)
    is_cell = (is_row & (maximum > float("-inf")))[:, None] & is_dim[None, :]
    tl.store(partials + results[:, None] * HEAD_DIM + dims[None, :], weighted, mask=is_cell)


def _merge(
    maxima, sums, partials, outputs, num_rows, num_nodes, num_kv_heads, num_parts,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_PARTS: tl.constexpr,  # type: ignore
):  # fmt: skip
    """The output of one row from the results of all parts."""
    row = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    maximum, total = float("-inf"), 0.0
    weighted = tl.full([BLOCK_DIM], 0.0, tl.float32)
    for first in range(0, num_parts, BLOCK_PARTS):
        parts = first + tl.arange(0, BLOCK_PARTS)
        is_part = parts < num_parts
        results = (pair * num_parts + parts) * num_rows + row
        part_maxima = tl.load(maxima + results, mask=is_part, other=float("-inf"))
        part_sums = tl.load(sums + results, mask=is_part, other=0.0)
        is_cell = (part_maxima > float("-inf"))[:, None] & is_dim[None, :]  # other parts wrote no values
        part_values = tl.load(partials + results[:, None] * HEAD_DIM + dims[None, :], mask=is_cell, other=0.0)
        new = tl.maximum(maximum, tl.max(part_maxima, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(part_maxima - shift)
        old = tl.exp2(maximum - shift)
        total = total * old + tl.sum(weights * part_sums, 0)
        weighted = weighted * old + tl.sum(weights[:, None] * part_values, 0)
        maximum = new
    place = (pair // num_kv_heads * num_nodes + row % num_nodes) * num_kv_heads + pair % num_kv_heads
    place = place * (num_rows // num_nodes) + row // num_nodes
    tl.store(outputs + place * HEAD_DIM + dims, (weighted / total).to(outputs.dtype.element_ty), mask=is_dim)
