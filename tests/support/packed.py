"""Packed matrices and what is computed with them, beside the `gguf` package."""

from __future__ import annotations

import copy
import os
import platform
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_speculate_gguf.matrices import Matrix, TensorRows
from hf_speculate_gguf.native.backends import BACKENDS
from hf_speculate_gguf.native.binding import native_problem
from hf_speculate_gguf.native.modules import PackedLinear
from hf_speculate_gguf.reading import GgufFile, TensorEntry, file_identity

from .models import VOCAB_SIZE
from .random_gguf import FileShape, one_type, random_blocks, write_random_file


CPU = torch.device("cpu")
SMALLEST = FileShape("llama", 40, 32, 64, 2, 4, 2, 128, is_tied=False)

# Flags of compilers that leave out instructions: all but those that compilers know everywhere; all beyond AVX2;
# AVX-512; AMX and VNNI.
OTHER_CPUS: list[Any] = ["-DHFS_PORTABLE"]
if platform.machine().lower() in ("x86_64", "amd64"):
    rare = ("-mno-avx512f", "-DHFS_NO_AMX -mno-avx512vnni")  # each takes half a minute to compile
    OTHER_CPUS += ["-mno-avx512f -mno-avxvnni", *(pytest.param(flags, marks=pytest.mark.slow) for flags in rare)]


def make_matrix(
    folder, kind: str, rows: int, columns: int = 512, parts: int = 1, seed: int = 0, change=lambda data: None
) -> Matrix:
    """Random blocks in a file of nothing else, as `parts` tensors of equal size; `change` writes into their bytes."""
    path = folder / f"{kind}-{rows}-{columns}.bin"
    blocks = random_blocks(kind, rows, columns, 0.5, np.random.default_rng(seed))
    change(blocks.reshape(-1))
    blocks.tofile(path)
    with open(path, "rb") as opened:
        file, size = GgufFile(str(path), {}, {}, blocks.nbytes, file_identity(opened)), rows // parts
    entries = [
        TensorEntry(f"t{i}", (size, columns), kind, i * size * blocks.shape[1], blocks.shape[1]) for i in range(parts)
    ]
    return Matrix(tuple(TensorRows(file, entry) for entry in entries))


def reference(matrix: Matrix) -> torch.Tensor:
    """float32 [N, K], by the `gguf` package."""
    blocks = matrix.read(0, matrix.num_rows).numpy()
    return torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[matrix.type]))


def pack(matrix: Matrix, backend: str, dtype: torch.dtype) -> PackedLinear:
    chosen = BACKENDS[backend]
    if problem := chosen.problem(CPU, dtype):
        pytest.skip(f"{backend}: {problem}")
    return PackedLinear(matrix.num_columns, matrix.num_rows, matrix.type, chosen, chosen.pack(matrix, CPU))


def quantized(inputs: torch.Tensor) -> torch.Tensor:
    """float64 [M, K]: the rows as "native-int8" multiplies them."""
    blocks = inputs.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    factors = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)  # 127 / x would be 127 * (1 / x)
    integers = (blocks.double() * factors.double()).round()  # as multiplied and added at once
    return (integers * (largest / 127)).flatten(-2)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return ((found.float() - expected).abs().max() / expected.abs().max()).item()


def modules_only(model):
    """The same weights, computed by the modules."""
    return copy.deepcopy(model)  # until `fuse`


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    """Tokens of a small vocabulary."""
    return torch.randint(3, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def padded(lengths) -> dict[str, torch.Tensor]:
    """A left-padded batch with masks and positions; a row's tokens are `ids(1, length, seed=length)`."""
    width = max(lengths)
    rows = [torch.nn.functional.pad(ids(1, length, seed=length), (width - length, 0)) for length in lengths]
    mask = torch.stack([torch.arange(width) >= width - length for length in lengths]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": torch.cat(rows), "attention_mask": mask, "position_ids": positions}


def shape_of(architecture: str, hidden: int = 256, tied: bool = False, layers: int = 2) -> FileShape:
    """A tiny model whose every step repeats the last token by a wide margin."""
    head_dim = 128 if architecture == "qwen3" else None
    return FileShape(
        architecture, VOCAB_SIZE, hidden, 256, layers, 4, 2, 256, is_tied=tied, embedding_std=1.0, head_dim=head_dim
    )


def write_model(path: Path, shape: FileShape = SMALLEST, recipe="Q4_0", **kwargs) -> Path:
    """Writes a random model, of one type or by a recipe; returns its path."""
    write_random_file(path, shape, one_type(recipe) if isinstance(recipe, str) else recipe, **kwargs)
    return path


def dequantised(path: str, dtype: torch.dtype = torch.float32):
    """What transformers makes of the file."""
    folder, name = os.path.split(path)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype).eval()


def available(*backends: str) -> list[str]:
    """Those that run here: "native" needs a C++ compiler."""
    return [name for name in backends if name != "native" or not native_problem()]
