"""Packed matrices and what is computed with them, beside the `gguf` package."""

from __future__ import annotations

import copy
import platform
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from hf_speculate.gguf.matrices import Matrix, TensorRows
from hf_speculate.gguf.reading import GgufFile, TensorEntry, file_identity
from hf_speculate.native.backends import BACKENDS
from hf_speculate.native.modules import PackedLinear

from .models import VOCAB_SIZE
from .random_gguf import random_blocks


CPU = torch.device("cpu")

# Flags of compilers that leave out instructions: all but those that compilers know everywhere; AVX-512; VNNI too; AMX.
OTHER_CPUS: list[Any] = ["-DHFS_PORTABLE"]
if platform.machine().lower() in ("x86_64", "amd64"):
    rare = ("-mno-avx512f -mno-avxvnni", "-DHFS_NO_AMX -mno-avx512vnni")  # each takes half a minute to compile
    OTHER_CPUS += ["-mno-avx512f", *(pytest.param(flags, marks=pytest.mark.slow) for flags in rare)]


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
    tensors = chosen.pack(matrix, dtype, CPU)
    return PackedLinear(matrix.num_columns, matrix.num_rows, matrix.type, chosen, tensors)


def rounded(inputs: torch.Tensor) -> torch.Tensor:
    """float64 [M, K]: the rows as "native-int8" multiplies them."""
    blocks = inputs.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    factors = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)  # 127 / x would be 127 * (1 / x)
    integers = (blocks.double() * factors.double()).round()  # as multiplied and added at once
    return (integers * (largest / 127)).flatten(-2)


def token_ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(1))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return ((found.float() - expected).abs().max() / expected.abs().max()).item()


def modules_only(model):
    """The same weights, computed by the modules."""
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        layer.__dict__.pop("forward")
    return twin


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    """Tokens of a small vocabulary."""
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed))
