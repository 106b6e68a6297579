"""GGUF files written: metadata, and tensors in plain types or in blocks.

The `gguf` package lays out the file and makes the blocks. The caller decides the content.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import user_path


# Types of matrices that can be written, by the names that llama.cpp's converter gives them.
OUT_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}

_LARGEST_F16 = torch.finfo(torch.float16).max


def write_gguf(
    path: str | os.PathLike[str],
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    out_type: str = "f16",
) -> None:
    """Writes one file.

    Args:
        architecture: `general.architecture`.
        metadata: values by key: truth values, integers (32 bit), numbers, texts, and lists of one of these.
        tensors: tensors by name, shapes in torch's order. Integers are written as I64; vectors, and tensors of more
            than two dimensions, as F32.
        out_type: type of the matrices, a name of `OUT_TYPES`. Rows that are not a whole number of blocks stay F16.
    Raises:
        CheckpointError: the type is unknown, or a weight is too large for it.
    """
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
        from gguf.quants import quantize
    except ImportError as error:
        raise SpeculateError(
            "writing GGUF files takes the `gguf` package: pip install 'hf-speculate[gguf]' (or pip install gguf)."
        ) from error
    if out_type not in OUT_TYPES:
        raise CheckpointError(f"unknown type {out_type!r} of a GGUF file; possible: {', '.join(OUT_TYPES)}.")
    writer = GGUFWriter(user_path(path), architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    wanted = GGMLQuantizationType[OUT_TYPES[out_type]]
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu()
        if not plain.is_floating_point():
            writer.add_tensor(name, plain.long().contiguous().numpy())
            continue
        kind = wanted if plain.dim() == 2 else GGMLQuantizationType.F32
        if plain.shape[-1] % GGML_QUANT_SIZES[kind][0]:
            kind = GGMLQuantizationType.F16
        values = plain.float().contiguous()
        if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.BF16) and values.abs().max() > _LARGEST_F16:
            raise CheckpointError(f"{name} holds weights beyond {_LARGEST_F16:.0f}, too large for {kind.name}: bf16.")
        writer.add_tensor(name, quantize(values.numpy(), kind), raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    """Adds one value under the type that llama.cpp reads it with."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))
