"""Products with packed matrices on a GPU, for up to 64 rows, by Triton kernels.

Codes are integers, which 16-bit floats hold exactly. So a tensor core multiplies them with the inputs, and the scale of
a group is applied to the float32 sum. Weights are rounded nowhere.

A program computes 16 rows by a tile of 64 matrix rows, over one split of the columns. A second kernel adds the splits
in their order. **The bits of a row depend on nothing but the row**: splits and the order of sums follow from the shape
and type of the matrix, and one row is computed as 16 are. Nothing is tuned at run time, and no sum uses atomics.

The first call for a type and dtype compiles: it must come before the capture of a CUDA graph. With TRITON_INTERPRET=1
in the environment, Triton's interpreter runs the kernels on a CPU.
"""

# pyright: reportPossiblyUnboundVariable=false
# (Branches of a kernel are taken when it is compiled, so one that defines a name belongs to those that use it.)

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from hf_speculate.triton_support import check_operands, has_triton, is_interpreting

from .planes import LAYOUTS, TILE_ROWS, tile_bytes


MAX_ROWS = 64
"""Most rows that the kernel multiplies. Each 16 of them read the matrix again, mostly from the GPU's cache."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_BLOCK_ROWS = 16  # rows of a program: the fewest that a tensor core takes
# Options of both kernels. A product and a sum in one instruction are what Triton 3.9 makes by default, and 3.10 not.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
_ADD_COLUMNS = 256  # columns of a program that adds splits
# Programs wanted for a matrix, so that loads of several are on their way in each multiprocessor. It is a constant:
# with the number of multiprocessors, the bits of a row would depend on the GPU.
_PROGRAMS = 512
_MOST_SPLITS = 16
_LEAST_COLUMNS = 256  # of a split

# Arguments whose values are not compiled into the kernels.
_VARYING = ("num_rows", "num_slabs", "slabs_per_split", "num_splits")

# triton.language and functions that kernels call, set by `_kernels`: kernels look them up among the globals here.
tl: Any = None
decode: Any = None
factor: Any = None
half: Any = None


def problem(device: torch.device, dtype: torch.dtype) -> str:
    """The reason why `multiply` cannot run for this device and dtype; "" if it can."""
    if dtype not in DTYPES:
        return f"it computes in bfloat16, float16 or float32, not {dtype}"
    if is_interpreting() and has_triton():
        return ""
    if device.type != "cuda":
        return f"it computes on NVIDIA GPUs, not on {device.type!r}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (`pip install triton`)"
    if not torch.cuda.is_available():
        return "this PyTorch sees no NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        major, minor = capability
        return f"it needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has {major}.{minor}"
    return "" if has_triton() else "Triton's kernels do not run here: the log has a warning with the reason"


def num_splits(block_type: str, out_features: int, in_features: int) -> tuple[int, int]:
    """Number of splits of the columns, and slabs of each (the last may have fewer).

    They depend on the shape and type of the matrix alone.
    """
    layout, num_tiles = LAYOUTS[block_type], -(-out_features // TILE_ROWS)
    num_slabs = layout.num_slabs(in_features)
    wanted = max(1, min(_PROGRAMS // num_tiles, _MOST_SPLITS, in_features // _LEAST_COLUMNS))
    slabs_per_split = -(-num_slabs // wanted)
    return -(-num_slabs // slabs_per_split), slabs_per_split


def multiply(
    inputs: Float[Tensor, "M K"], tiles: UInt8[Tensor, "T bytes"], block_type: str, out_features: int
) -> Float[Tensor, "M N"]:
    """x @ w.T by the kernels, for at most `MAX_ROWS` rows and weights packed by `planes.pack`.

    Raises:
        ValueError: the tiles are not those of a matrix of this shape and type.
    """
    (num_rows, in_features), layout = inputs.shape, LAYOUTS[block_type]
    num_tiles = -(-out_features // TILE_ROWS)
    expected = (num_tiles, tile_bytes(block_type, in_features))
    check_operands(inputs.device, (tiles, expected, (torch.uint8,)), (inputs, inputs.shape, DTYPES))
    outputs = inputs.new_empty(num_rows, out_features)
    if not num_rows:
        return outputs
    splits, slabs_per_split = num_splits(block_type, out_features, in_features)
    results = outputs
    if splits > 1:
        results = inputs.new_empty(splits, num_rows, out_features, dtype=torch.float32)
    product, add = _kernels()
    at = layout.offsets(in_features)
    with torch.cuda.device_of(inputs):  # Triton launches on the current device
        product[(-(-num_rows // _BLOCK_ROWS), num_tiles, splits)](
            *(inputs.contiguous(), tiles.contiguous(), results, num_rows, out_features, in_features),
            *(layout.num_slabs(in_features), slabs_per_split, at.end),
            *(at.high, at.scale_factors, at.offset_factors, at.scales, at.offsets),
            **(constants(block_type, inputs.dtype, in_features, is_interpreting()) | OPTIONS),
        )
        if splits > 1:
            grid = (num_rows, -(-out_features // _ADD_COLUMNS))
            add[grid](results, outputs, num_rows, out_features, splits, BLOCK=_ADD_COLUMNS, **OPTIONS)
    return outputs


def constants(block_type: str, dtype: torch.dtype, in_features: int, interpreted: bool) -> dict[str, Any]:
    """Constants of the product's kernel for a type and dtype.

    Args:
        interpreted: whether the interpreter runs it, which multiplies bfloat16 wrongly: float32 takes its place.
    """
    layout = LAYOUTS[block_type]
    return {
        **{"LOW": layout.low, "HIGH": layout.high, "RUN": layout.run, "CODES": layout.codes_per_word},
        **{"GROUP": layout.group, "BIAS": layout.bias, "HAS_OFFSET": layout.has_offset},
        **{"FACTORS": layout.num_factors, "FACTOR_BIAS": layout.factor_bias, "LOOKS_UP": layout.looks_up},
        **{"GROUPS_PER_WORD": 4 if layout.num_factors else 2, "IS_PADDED": in_features % layout.slab != 0},
        "FACTOR": tl.float32 if interpreted else getattr(tl, str(dtype).removeprefix("torch.")),
        **{"TILE": TILE_ROWS, "BLOCK_ROWS": _BLOCK_ROWS},
    }


@cache
def _kernels() -> tuple[Any, Any]:
    """Both kernels. The first call imports Triton and decides whether to interpret them."""
    global tl, decode, factor, half
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
    decode, factor, half = triton.jit(_decode), triton.jit(_factor), triton.jit(_half)
    return triton.jit(_product, do_not_specialize=_VARYING), triton.jit(_add, do_not_specialize=_VARYING)


def _decode(
    low, high, PLACE: tl.constexpr, HIGH_PLACE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,  # type: ignore
    BIAS: tl.constexpr, LOOKS_UP: tl.constexpr,  # type: ignore
):  # fmt: skip
    """float32: the integers whose codes have their low bits at PLACE of `low` and the others at HIGH_PLACE of `high`.

    An integer below 2^23 is the mantissa of a float32, so nothing is converted, which would be slow. A code stays at
    its place in the word, which is a factor. All steps are exact.
    """
    if LOOKS_UP:  # the entry of planes.TABLE, four in each constant
        code = (low >> PLACE) & 15
        words = tl.where(
            code < 8, tl.where(code < 4, 0x3F2D1801, 0x766A5D4F), tl.where(code < 12, 0xA6998D81, 0xF1D9C5B5)
        )
        entries = (words.to(tl.int32) >> ((code & 3) * 8)) & 255
        return (entries | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + BIAS)
    code = low & (((1 << LOW) - 1) << PLACE)
    if HIGH > 0:
        moved = high << PLACE + LOW - HIGH_PLACE if PLACE + LOW >= HIGH_PLACE else high >> HIGH_PLACE - PLACE - LOW
        code = code | (moved & (((1 << HIGH) - 1) << (PLACE + LOW)))
    mantissa = (code | 0x4B000000).to(tl.float32, bitcast=True)
    return mantissa * (1.0 / (1 << PLACE)) - (8388608.0 / (1 << PLACE) + BIAS)


def _factor(words, PLACE: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr):  # type: ignore
    """float32: the factors at bit PLACE of words."""
    return (((words >> PLACE) & MASK) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + BIAS)


def _half(words, INDEX: tl.constexpr):  # type: ignore
    """float32: the lower (0) or upper (1) float16 values of words."""
    return (words >> (INDEX * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


def _product(
    inputs, tiles, results, num_rows, num_columns, in_features, num_slabs, slabs_per_split,
    tile_bytes, high_at, scale_factors_at, offset_factors_at, scales_at, offsets_at,
    LOW: tl.constexpr, HIGH: tl.constexpr, RUN: tl.constexpr, CODES: tl.constexpr,  # type: ignore
    GROUP: tl.constexpr, BIAS: tl.constexpr, HAS_OFFSET: tl.constexpr, FACTORS: tl.constexpr,  # type: ignore
    FACTOR_BIAS: tl.constexpr, LOOKS_UP: tl.constexpr, GROUPS_PER_WORD: tl.constexpr,  # type: ignore
    IS_PADDED: tl.constexpr, FACTOR: tl.constexpr, TILE: tl.constexpr, BLOCK_ROWS: tl.constexpr,  # type: ignore
):  # fmt: skip
    """Products of a block of rows with a tile, over one split of the columns.

    `results` is [splits, rows, N]: float32, or with a single split the outputs. FACTOR is the dtype of what tensor
    cores multiply: that of the inputs, but float32 in the interpreter, which cannot multiply bfloat16.
    """
    split = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    lanes, steps = tl.arange(0, TILE), tl.arange(0, RUN)
    tile = tiles + tl.program_id(1).to(tl.int64) * tile_bytes
    cells = steps[:, None] * TILE + lanes[None, :]
    lows = tile.to(tl.pointer_type(tl.int16 if LOW == 2 else tl.int32)) + cells
    highs = (tile + high_at).to(tl.pointer_type(tl.int16 if HIGH == 2 else tl.uint8)) + cells
    scale_words = (tile + (scale_factors_at if FACTORS else scales_at)).to(tl.pointer_type(tl.int32)) + lanes
    offset_words = (tile + (offset_factors_at if FACTORS else offsets_at)).to(tl.pointer_type(tl.int32)) + lanes
    super_scales = (tile + scales_at).to(tl.pointer_type(tl.float16)) + lanes
    super_offsets = (tile + offsets_at).to(tl.pointer_type(tl.float16)) + lanes
    # Rows beyond the end repeat the last one: their results are not stored, and loads need no mask.
    columns = inputs + tl.minimum(rows, num_rows - 1)[:, None] * in_features + steps[None, :]
    ones = tl.full([RUN, TILE], 1.0, FACTOR)
    total = tl.full([BLOCK_ROWS, TILE], 0.0, tl.float32)
    for slab in range(split * slabs_per_split, tl.minimum((split + 1) * slabs_per_split, num_slabs)):
        low = tl.load(lows + slab * (RUN * TILE)).to(tl.int32)
        high = low
        if HIGH > 0:
            high = tl.load(highs + slab * (RUN * TILE)).to(tl.int32)
        if HAS_OFFSET and HIGH > 0:
            # Ones that look as if they came of the high bits: so the inputs have the same layout in both dots, and are
            # copied to shared memory ahead of time, once.
            ones = (high >= 0).to(FACTOR)
        if FACTORS > 0:  # a slab lies within the 256 columns of a float16 value
            super_scale = tl.load(super_scales + slab * (RUN * CODES) // 256 * TILE).to(tl.float32)
            if HAS_OFFSET:
                super_offset = -tl.load(super_offsets + slab * (RUN * CODES) // 256 * TILE).to(tl.float32)
        for j in tl.static_range(CODES):
            if j * LOW + LOW + HIGH > 23:
                integers = decode(low >> 16, high, j * LOW - 16, j * HIGH, LOW, HIGH, BIAS, LOOKS_UP)
            else:
                integers = decode(low, high, j * LOW, j * HIGH, LOW, HIGH, BIAS, LOOKS_UP)
            if IS_PADDED:
                is_column = (slab * (RUN * CODES) + j * RUN + steps < in_features)[None, :]
                values = tl.load(columns + (slab * (RUN * CODES) + j * RUN), mask=is_column, other=0.0).to(FACTOR)
            else:
                values = tl.load(columns + (slab * (RUN * CODES) + j * RUN)).to(FACTOR)
            if j * RUN % GROUP == 0:
                part = tl.full([BLOCK_ROWS, TILE], 0.0, tl.float32)
                sums = tl.full([BLOCK_ROWS, TILE], 0.0, tl.float32)
                if j * RUN // GROUP % GROUPS_PER_WORD == 0:
                    word = (slab * (RUN * CODES // GROUP) + j * RUN // GROUP) // GROUPS_PER_WORD * TILE
                    scale_word = tl.load(scale_words + word)
                    offset_word = scale_word
                    if HAS_OFFSET and FACTORS != 1:
                        offset_word = tl.load(offset_words + word)
            part = tl.dot(values, integers.to(FACTOR), part, input_precision="ieee")
            if HAS_OFFSET:
                sums = tl.dot(values, ones, sums, input_precision="ieee")
            if (j + 1) * RUN % GROUP == 0:
                if FACTORS == 0:
                    scale = half(scale_word, j * RUN // GROUP % GROUPS_PER_WORD)
                elif FACTORS == 1 and HAS_OFFSET:
                    scale = factor(scale_word, j * RUN // GROUP % GROUPS_PER_WORD * 8, 15, 0) * super_scale
                else:
                    scale = factor(scale_word, j * RUN // GROUP % GROUPS_PER_WORD * 8, 255, FACTOR_BIAS) * super_scale
                total += part * scale[None, :]
                if HAS_OFFSET:
                    if FACTORS == 0:
                        offset = half(offset_word, j * RUN // GROUP % GROUPS_PER_WORD)
                    elif FACTORS == 1:
                        offset = factor(scale_word, j * RUN // GROUP % GROUPS_PER_WORD * 8 + 4, 15, 0) * super_offset
                    else:
                        offset = factor(offset_word, j * RUN // GROUP % GROUPS_PER_WORD * 8, 255, 0) * super_offset
                    total += sums * offset[None, :]
    columns = tl.program_id(1) * TILE + lanes
    places = (split * num_rows + rows)[:, None] * num_columns + columns[None, :]
    is_cell = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(results + places, total.to(results.dtype.element_ty), mask=is_cell)


def _add(results, outputs, num_rows, num_columns, num_splits, BLOCK: tl.constexpr):  # type: ignore
    """The sum of all splits for a part of a row, in the order of the splits."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    total = tl.full([BLOCK], 0.0, tl.float32)
    for split in range(num_splits):
        places = (split * num_rows + row) * num_columns + columns
        total += tl.load(results + places, mask=is_column, other=0.0)
    tl.store(outputs + row * num_columns + columns, total.to(outputs.dtype.element_ty), mask=is_column)
