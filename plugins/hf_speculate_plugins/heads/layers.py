"""Parts of decoder layers, and how a head calls modules of its target."""

from __future__ import annotations

import copy
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_speculate.target import unhooked
from hf_speculate.transfers import to_device


# Of the longest text that RoPE is tried with; float32 counts to here.
_MAX_POSITION = 1 << 24


@runtime_checkable
class LayerSpec(Protocol):
    """What layers are built from; attributes as of `EagleSpec`."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def hidden_act(self) -> str: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def rope(self) -> dict[str, Any]: ...
    @property
    def max_position_embeddings(self) -> int: ...


class MLP(nn.Module):
    """Gated feed-forward of Llama."""

    def __init__(self, spec: LayerSpec):
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)
        self.activation = ACT2FN[spec.hidden_act]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(inputs)) * self.up_proj(inputs))


def rotary_embedding(spec: LayerSpec) -> LlamaRotaryEmbedding:
    """RoPE of a head, on the CPU: computed, not loaded, it must not end on the meta device."""
    with torch.device("cpu"):
        return LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=spec.hidden_size,
                num_attention_heads=spec.num_heads,
                head_dim=spec.head_dim,
                max_position_embeddings=spec.max_position_embeddings,
                rope_parameters=dict(spec.rope),
            )
        )


def sample_angles(rotary: nn.Module, spec: LayerSpec) -> list[Tensor]:
    """Cosines and sines at positions on both sides of every length at which a type of RoPE changes what it does."""
    original = int(spec.rope.get("original_max_position_embeddings") or 1)
    rotary, states = copy.deepcopy(rotary), torch.zeros(1, 1, spec.hidden_size)  # a copy: it remembers lengths
    positions = (min(length, _MAX_POSITION) for length in (1, 2 * original, 2 * spec.max_position_embeddings))
    return [part for position in positions for part in rotary(states, torch.tensor([[position]]))]


def call_beside(module: Any, inputs: Tensor) -> Tensor:
    """What a module of the target, or of a head, makes of inputs that may lie on another device. The weight of an
    offloaded one is nowhere: its hook fetches both when called."""
    device = module.weight.device
    return unhooked(module)(inputs if device.type == "meta" else to_device(inputs, device))
