"""GGUF files of real shape with random weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch

from hf_speculate.errors import SpeculateError
from hf_speculate_gguf.native.formats import DENSE_TYPES, FORMATS

from .versions import skip_before


# Where a block has its scale, where its offset, and which offset (in scales) puts the mean of random weights near zero.
_FACTORS = {
    "Q4_0": (0, None, 0.0),
    "Q4_1": (0, 2, -7.5),
    "Q5_0": (0, None, 0.0),
    "Q5_1": (0, 2, -15.5),
    "Q8_0": (0, None, 0.0),
    "Q2_K": (80, 82, 1.5),
    "Q3_K": (108, None, 0.0),
    "Q4_K": (0, 2, 7.5),
    "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0),
    "IQ4_NL": (0, None, 0.0),
    "IQ4_XS": (0, None, 0.0),
}

_WEIGHT_STD = 0.02


@dataclass(frozen=True)
class FileShape:
    """What is in a random file; the default is Qwen2-0.5B.

    Attributes:
        head_dim: None: as many columns as the heads leave of the hidden size.
        embedding_std: where it is large against the layers' weights, every step repeats the last token by a wide
            margin, so that rounding never changes a text.
    """

    architecture: str = "qwen2"
    vocab_size: int = 151936
    hidden_size: int = 896
    intermediate_size: int = 4864
    num_layers: int = 24
    num_heads: int = 14
    num_kv_heads: int = 2
    context_length: int = 32768
    is_tied: bool = True
    embedding_std: float = 4.0
    head_dim: int | None = None

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Shapes of the matrices of a layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.head_size * self.num_heads, self.head_size * self.num_kv_heads
        return {
            "attn_q": (q_size, hidden),
            "attn_k": (kv_size, hidden),
            "attn_v": (kv_size, hidden),
            "attn_output": (hidden, q_size),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }

    @property
    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all tensors."""
        shapes: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (self.vocab_size, self.hidden_size))]
        for layer in range(self.num_layers):
            shapes += [(f"blk.{layer}.{name}", size) for name, size in self.layer_tensors(layer)]
        shapes.append(("output_norm.weight", (self.hidden_size,)))
        if not self.is_tied:
            shapes.append(("output.weight", (self.vocab_size, self.hidden_size)))
        return shapes

    def layer_tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of a layer's tensors."""
        for name, size in self.matrices.items():
            yield f"{name}.weight", size
            if self.architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                yield f"{name}.bias", size[:1]
        norms = ("attn_norm", "ffn_norm")
        if self.architecture in ("gemma2", "gemma3"):
            norms += ("post_attention_norm", "post_ffw_norm")
        yield from ((f"{name}.weight", (self.hidden_size,)) for name in norms)
        if self.architecture in ("qwen3", "gemma3"):
            yield from ((f"{name}.weight", (self.head_size,)) for name in ("attn_q_norm", "attn_k_norm"))


# Name and columns of a matrix -> its type.
Recipe = Callable[[str, int], str]


def one_type(kind: str) -> Recipe:
    """Everything of one type."""
    return lambda name, columns: kind


def q4_k_m(num_layers: int) -> Recipe:
    """The mix of llama.cpp's Q4_K_M: some values and down projections and the output finer than the rest.

    Matrices whose width is no multiple of 256 fall back to Q5_0 and Q8_0.
    """

    def choose(name: str, columns: int) -> str:
        parts = name.split(".")
        is_fine = parts[0] in ("output", "token_embd")
        if parts[0] == "blk" and parts[2] in ("attn_v", "ffn_down"):
            layer, eighth = int(parts[1]), num_layers // 8
            is_fine = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
        if columns % 256:
            return "Q8_0" if is_fine else "Q5_0"
        return "Q6_K" if is_fine else "Q4_K"

    return choose


def find_recipe(name: str, shape: FileShape) -> Recipe:
    """The recipe called `name`: a type, or "Q4_K_M"; raises `SpeculateError` where the shape does not allow it."""
    possible = [*FORMATS, *DENSE_TYPES, "Q4_K_M"]
    if name not in possible:
        raise SpeculateError(f"unknown type {name!r}; possible: {', '.join(possible)}.")
    if name == "Q4_K_M":
        return q4_k_m(shape.num_layers)
    widths = {columns for _, columns in shape.matrices.values()}
    if name in FORMATS and any(columns % FORMATS[name].block_size for columns in widths):
        raise SpeculateError(
            f"{name} comes in blocks of {FORMATS[name].block_size} weights; rows of {sorted(widths)} are no multiples."
        )
    return one_type(name)


def random_blocks(kind: str, rows: int, columns: int, std: float, generator: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes], or float32 [rows, columns] for types without blocks: weights of about that deviation, or
    small ones of types that cannot stay packed."""
    if kind in DENSE_TYPES:
        return generator.normal(0.0, std, (rows, columns)).astype(np.float32)
    if kind not in FORMATS:  # those whose blocks begin with their scale
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        blocks = np.frombuffer(generator.bytes(rows * columns // block_size * block_bytes), np.uint8).copy()
        blocks.reshape(-1, block_bytes)[:, :2] = np.frombuffer(np.float16(std / 64).tobytes(), np.uint8)
        return blocks.reshape(rows, -1)
    block_format = FORMATS[kind]
    shape = (rows * columns // block_format.block_size, block_format.block_bytes)
    blocks = np.frombuffer(generator.bytes(shape[0] * shape[1]), np.uint8).reshape(shape).copy()
    _set_factors(blocks, kind, 1 / 64)
    sample = torch.from_numpy(blocks[:64])
    _set_factors(blocks, kind, std / 64 / block_format.dequantize(sample).std().item())
    return blocks.reshape(rows, -1)


def _set_factors(blocks: np.ndarray, kind: str, scale: float) -> None:
    scale_at, offset_at, ratio = _FACTORS[kind]
    for place, value in ((scale_at, scale), (offset_at, scale * ratio)):
        if place is not None:
            blocks[:, place : place + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)


def write_random_file(
    path: str | os.PathLike[str],
    shape: FileShape,
    recipe: Recipe,
    *,
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
) -> None:
    """Writes a model without a tokenizer.

    Args:
        metadata: further keys (without the prefix of the architecture where they begin with a dot); str, bool, int,
            float and lists of them. None takes a key out.
        extra_tensors: further float32 tensors, or others in the place of those that would be random.
    """
    skip_before("5.18", "GGUF files do not load")
    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(os.fspath(path), shape.architecture)
    _write_metadata(writer, shape, metadata or {})
    given = dict(extra_tensors or {})
    for name, size in shape.tensors:
        if name in given:
            continue
        if len(size) == 1:
            noise = generator.normal(0.0, _WEIGHT_STD, size).astype(np.float32)
            writer.add_tensor(name, noise if name.endswith("bias") else 1 + noise)
            continue
        kind = recipe(name, size[1])
        std = shape.embedding_std if name == "token_embd.weight" else _WEIGHT_STD
        _add_matrix(writer, name, random_blocks(kind, size[0], size[1], std, generator), kind)
    for name, values in given.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_matrix(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    if kind in DENSE_TYPES:
        values = gguf.quantize(values, quantization)
    writer.add_tensor(name, values, raw_dtype=quantization)


def _write_metadata(writer: gguf.GGUFWriter, shape: FileShape, changes: Mapping[str, Any]) -> None:
    values: dict[str, Any] = {
        "general.name": "random weights",
        ".context_length": shape.context_length,
        ".embedding_length": shape.hidden_size,
        ".block_count": shape.num_layers,
        ".feed_forward_length": shape.intermediate_size,
        ".attention.head_count": shape.num_heads,
        ".attention.head_count_kv": shape.num_kv_heads,
        ".attention.key_length": shape.head_dim,
        ".attention.value_length": shape.head_dim,
        ".rope.freq_base": 10000.0,
        ".attention.layer_norm_rms_epsilon": 1e-6,
        ".vocab_size": shape.vocab_size,
        **changes,
    }
    add = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in values.items():
        if value is not None:
            add[type(value)](f"{shape.architecture}{key}" if key.startswith(".") else key, value)
