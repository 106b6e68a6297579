"""GGUF files of Qwen3.5's architecture with random weights: gated delta nets, gated attention, draft layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from hf_speculate_gguf.delta_net import CONVOLUTION, DECAY, DeltaNet

from .models import VOCAB_SIZE
from .random_gguf import FileShape, Recipe, one_type, write_random_file


EVERY = 4  # the last of so many layers has attention
ROTATED = 16  # values of a head that RoPE turns


_NET = DeltaNet(key_heads=2, value_heads=4, key_size=32, value_size=64, kernel=4)


@dataclass(frozen=True, kw_only=True)
class HybridShape(FileShape):
    """What is in a file; the default is tiny.

    Attributes:
        num_layers: number of blocks, draft layers among them.
        net: sizes of the delta nets.
    """

    architecture: str = "qwen35"
    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    intermediate_size: int = 256
    num_layers: int = EVERY + 1
    num_heads: int = 4
    num_kv_heads: int = 2
    context_length: int = 512
    is_tied: bool = False
    embedding_std: float = 1.0
    head_dim: int | None = 64
    num_draft_layers: int = 1
    net: DeltaNet = _NET

    def layer_tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden = self.hidden_size
        drafts = layer >= self.num_layers - self.num_draft_layers
        matrices = dict(self.matrices)
        matrices["attn_q"] = (2 * matrices["attn_q"][0], hidden)
        if (layer + 1) % EVERY and not drafts:
            matrices = {name: size for name, size in matrices.items() if name.startswith("ffn")}
            yield from self.net.shapes(hidden).items()
        else:
            yield from ((f"{name}.weight", (self.head_size,)) for name in ("attn_q_norm", "attn_k_norm"))
        yield from ((f"{name}.weight", size) for name, size in matrices.items())
        yield from ((f"{name}.weight", (hidden,)) for name in ("attn_norm", "post_attention_norm"))
        if drafts:
            yield "nextn.eh_proj.weight", (hidden, 2 * hidden)
            yield from ((f"nextn.{name}.weight", (hidden,)) for name in ("enorm", "hnorm", "shared_head_norm"))

    @property
    def metadata(self) -> dict[str, Any]:
        """Keys beyond those of every file."""
        return {
            "tokenizer.ggml.tokens": [f"<{token}>" for token in range(self.vocab_size)],
            ".nextn_predict_layers": self.num_draft_layers or None,
            ".full_attention_interval": EVERY,
            ".rope.dimension_count": ROTATED,
            ".rope.dimension_sections": [3, 3, 2, 0],
            ".ssm.conv_kernel": self.net.kernel,
            ".ssm.state_size": self.net.key_size,
            ".ssm.group_count": self.net.key_heads,
            ".ssm.time_step_rank": self.net.value_heads,
            ".ssm.inner_size": self.net.value_heads * self.net.value_size,
        }


TILED = HybridShape()
UNTILED = HybridShape(net=replace(_NET, key_heads=4))


def write_hybrid(
    path: Path,
    shape: HybridShape = TILED,
    recipe: str | Recipe = "Q8_0",
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes a random model; returns its path. Decays and convolutions are as files have them, other arguments as of
    `write_random_file`."""
    draws, special = np.random.default_rng(3), {}
    for name, size in shape.tensors:
        if name.endswith(DECAY):
            special[name] = -np.exp(draws.normal(0, 1, size)).astype(np.float32)
        elif name.endswith(CONVOLUTION):
            special[name] = draws.normal(0, 0.5, size).astype(np.float32)
    write_random_file(
        path,
        shape,
        one_type(recipe) if isinstance(recipe, str) else recipe,
        metadata=shape.metadata | (metadata or {}),
        extra_tensors=special | (extra_tensors or {}),
    )
    return path


def write_drafts_only(path: Path, of: Path) -> Path:
    """Writes the draft layers of a file into one of their own, as some quantisers do; returns its path."""
    reader, shape = gguf.GGUFReader(of), TILED
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_uint32("qwen35.block_count", shape.num_layers)
    writer.add_uint32("qwen35.nextn_predict_layers", shape.num_draft_layers)
    for tensor in reader.tensors:
        if tensor.name.startswith((f"blk.{EVERY}.", "token_embd", "output")):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
