"""Gated delta nets in GGUF files: the recurrent layers of Qwen3.5 (arXiv:2412.06464).

Where several value heads share a key head, llama.cpp's converter (`conversion/qwen.py`) stores value heads *tiled*: the
first one of each key head, then the second ones. transformers has all heads of a key head side by side. Rows of packed
matrices can be put in order, columns cannot, as they share blocks: `ssm_out` has its inputs reordered instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from hf_speculate.errors import CheckpointError

from .metadata import Metadata


# Projections of a layer's input: name in the file -> name in transformers, in the order in which they are called.
INPUTS = {"attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_beta": "in_proj_b", "ssm_alpha": "in_proj_a"}
# Further tensors of a layer. `FROM_VALUES` projects the values of all heads.
FROM_VALUES, CONVOLUTION, NORM = "ssm_out.weight", "ssm_conv1d.weight", "ssm_norm.weight"
DECAY, TIME_STEP = "ssm_a", "ssm_dt.bias"


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of the delta nets of a model.

    Attributes:
        key_heads, value_heads: number of heads; as many value heads share each key head.
        key_size, value_size: size of a head.
        kernel: width of the convolution, in tokens.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int

    @classmethod
    def read(cls, reader: Metadata, architecture: str) -> DeltaNet:
        """The sizes by a file's metadata; raises `CheckpointError` if they do not fit each other."""
        prefix = f"{architecture}.ssm"
        key_heads, value_heads = (reader.size(f"{prefix}.{name}") for name in ("group_count", "time_step_rank"))
        inner = reader.size(f"{prefix}.inner_size")
        if value_heads % key_heads or inner % value_heads:
            raise CheckpointError(
                f"{reader.file.path!r}: {inner} values in {value_heads} heads, {key_heads} heads of keys: heads must "
                "be of one size, and as many must share each head of keys."
            )
        key_size, kernel = (reader.size(f"{prefix}.{name}") for name in ("state_size", "conv_kernel"))
        return cls(key_heads, value_heads, key_size, inner // value_heads, kernel)

    @property
    def config(self) -> dict[str, int]:
        """The sizes by the names of transformers' configurations."""
        return {
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.key_size,
            "linear_value_head_dim": self.value_size,
            "linear_conv_kernel_dim": self.kernel,
        }

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of a layer, by name after the layer's prefix."""
        values = self.value_heads * self.value_size
        channels = 2 * self.key_heads * self.key_size + values
        return {
            "attn_qkv.weight": (channels, hidden_size),
            "attn_gate.weight": (values, hidden_size),
            "ssm_beta.weight": (self.value_heads, hidden_size),
            "ssm_alpha.weight": (self.value_heads, hidden_size),
            FROM_VALUES: (hidden_size, values),
            CONVOLUTION: (channels, self.kernel),
            NORM: (self.value_size,),
            DECAY: (self.value_heads,),
            TIME_STEP: (self.value_heads,),
        }

    def row_order(self, name: str) -> Int64[Tensor, " N"] | None:
        """The rows of a tensor in transformers' order; None if they are in order.

        Args:
            name: name after the layer's prefix.
        """
        if name in ("ssm_beta.weight", "ssm_alpha.weight", DECAY, TIME_STEP):
            return self._grouped(1)
        if name == "attn_gate.weight":
            return self.value_order
        if name not in ("attn_qkv.weight", CONVOLUTION) or self.value_order is None:
            return None
        before = 2 * self.key_heads * self.key_size  # queries and keys
        return torch.cat([torch.arange(before, dtype=torch.long, device="cpu"), before + self.value_order])

    @property
    def value_order(self) -> Int64[Tensor, " V"] | None:
        """All values, of all heads, in transformers' order; None if they are in order."""
        return self._grouped(self.value_size)

    def _grouped(self, size: int) -> Int64[Tensor, " V"] | None:
        """The order of value heads with `size` entries each."""
        if self.value_heads == self.key_heads:
            return None
        return (
            torch.arange(self.value_heads * size, dtype=torch.long, device="cpu")
            .view(-1, self.key_heads, size)
            .transpose(0, 1)
            .reshape(-1)
        )
