"""Models of real shapes with random weights: they cost as much as a real target."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from hf_speculate.errors import SpeculateError
from hf_speculate.target import GenerativeModel
from hf_speculate_tools.bench.workload import Workload
from hf_speculate_tools.commands import find_device, find_dtype


# Embeddings are large compared with what the layers add, so every step repeats the last token by a wide margin.
# Rounding then never changes the text that a script was made from.
_EMBEDDING_STD = 4.0
_STD = 0.02
_PROMPT_LENGTH = 256


@dataclass(frozen=True)
class ModelShape:
    """A Qwen2 architecture; the default is Qwen2-0.5B.

    (Llama's differs by biases of three projections: 0.02 % of the weights of an 8B model.)
    """

    hidden_size: int = 896
    intermediate_size: int = 4864
    num_hidden_layers: int = 24
    num_attention_heads: int = 14
    num_key_value_heads: int = 2
    vocab_size: int = 151936
    tie_word_embeddings: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_parameters(self) -> int:
        """Number of weights in the matrices."""
        attention = 2 * self.hidden_size * (self.hidden_size + self.num_key_value_heads * self.head_dim)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        outer = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_hidden_layers * layer + outer

    def with_layers(self, num_layers: int | None) -> ModelShape:
        """The shape with fewer layers; None keeps them all."""
        return self if num_layers is None else replace(self, num_hidden_layers=num_layers)

    def build(self, dtype: torch.dtype, device: torch.device) -> GenerativeModel:
        """A model with random weights whose greedy choices have wide margins."""
        config = Qwen2Config(**asdict(self), max_position_embeddings=32768, initializer_range=_STD)
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        embeddings = model.get_input_embeddings().weight
        embeddings.mul_(_EMBEDDING_STD / _STD)
        if not self.tie_word_embeddings:
            model.get_output_embeddings().weight.copy_(embeddings)
        return model


SHAPES = {
    "0.5B": ModelShape(),  # Qwen2-0.5B
    "1.5B": ModelShape(1536, 8960, 28, 12, 2, 151936),  # Qwen2-1.5B
    "llama2-7b": ModelShape(4096, 11008, 32, 32, 32, 32000, False),
    "8B": ModelShape(4096, 14336, 32, 32, 8, 128256, False),  # Llama-3.1-8B
}


Shape = Annotated[str, typer.Option(help=f"Shape of the random weights: {', '.join(SHAPES)}.")]
Layers = Annotated[
    int | None,
    typer.Option(min=1, help="Number of layers, if the whole shape does not fit into memory (default: all)."),
]


def find_shape(name: str) -> ModelShape:
    """A shape by name; raises `SpeculateError`."""
    if name not in SHAPES:
        raise SpeculateError(f"unknown shape {name!r}; there are {', '.join(SHAPES)}.")
    return SHAPES[name]


def random_prompt(length: int, vocab_size: int, seed: int = 1) -> Tensor:
    """Random token ids, int64 [1, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (1, length), generator=generator)


def shape_workload(name: str, layers: int | None, dtype: str, device: str | None) -> Workload:
    """Random weights of a shape, and a random prompt of 256 tokens.

    Args:
        layers: number of layers, fewer than the shape has; None for all.
        dtype: name of a dtype; "auto" is bfloat16.
        device: name of a device; None for the accelerator if there is one.
    """
    shape = find_shape(name).with_layers(layers)
    return Workload(
        name=f"{name} shape of {shape.num_hidden_layers} layers, random weights",
        model=shape.build(find_dtype("bfloat16" if dtype == "auto" else dtype), find_device(device)),
        prompts=[("random", random_prompt(_PROMPT_LENGTH, shape.vocab_size)[0])],
    )
