"""Models of the report: pycoder with its EAGLE-3 head, and random weights of real shapes, made on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_speculate.drafting import Drafter
from hf_speculate.speculator import AutoSpeculator, Speculator
from hf_speculate.target import GenerativeModel
from hf_speculate_plugins.checkpoints import LoadReport
from hf_speculate_plugins.eagle import EagleDrafter, EagleHead, EagleSpec, LoadedHead

from ..benchmarks.shapes import ModelShape, find_shape, random_prompt
from ..support.paths import REPOSITORY


_EXAMPLES = REPOSITORY / "examples"
TARGET, HEAD = _EXAMPLES / "pycoder", _EXAMPLES / "pycoder-eagle3"
PROMPTS = (
    "class Stack:\n    def __init__(self):",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
    "def read_config(path):\n",
    "for index, line in enumerate(lines):\n    ",
)
TINY_SHAPE = ModelShape(64, 96, 3, 4, 2, 256)
# Tokens that the random head drafts with, as published heads of large vocabularies.
_DRAFT_VOCABULARY = 32000


def load_pycoder(device: torch.device, dtype: torch.dtype) -> GenerativeModel:
    """The bundled target of 20 layers."""
    logging.set_verbosity_error()
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


def pycoder_head(target: GenerativeModel, **options: Any) -> Speculator:
    """A speculator with the bundled EAGLE-3 head."""
    return AutoSpeculator.from_pretrained(HEAD, target=target, **options)


# Other drafters of pycoder, and the default policy: name -> function of the target.
DRAFTERS: dict[str, Callable[[GenerativeModel], Speculator]] = {
    "automatic": pycoder_head,
    "medusa": lambda target: AutoSpeculator.from_pretrained(_EXAMPLES / "pycoder-medusa", target=target),
    "dspark": lambda target: AutoSpeculator.from_pretrained(_EXAMPLES / "pycoder-dspark", target=target),
    "draft_model": lambda target: AutoSpeculator.from_name(
        "draft_model", target=target, model=str(_EXAMPLES / "pycoder-draft")
    ),
    "prompt_lookup": lambda target: AutoSpeculator.from_name("prompt_lookup", target=target),
}


def prompts(device: torch.device) -> list[Tensor]:
    """Token ids of each prompt, int64 [1, S]."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET)
    return [tokenizer(text, return_tensors="pt")["input_ids"].to(device) for text in PROMPTS]


def left_padded(ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts as one batch, and its attention mask."""
    width = max(each.shape[1] for each in ids)
    rows = [torch.nn.functional.pad(each, (width - each.shape[1], 0)) for each in ids]
    masks = [torch.nn.functional.pad(torch.ones_like(each), (width - each.shape[1], 0)) for each in ids]
    return torch.cat(rows), torch.cat(masks)


def shape_of(name: str, is_tiny: bool) -> ModelShape:
    """A shape by name; the tiny run has one shape for all names."""
    return TINY_SHAPE if is_tiny else find_shape(name)


def build(shape: ModelShape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> GenerativeModel:
    """A model with random weights, which are drawn on the device. Its greedy choices have wide margins."""
    logging.set_verbosity_error()
    return shape.build(dtype, device)


def random_prompts(count: int, length: int, shape: ModelShape, device: torch.device) -> Tensor:
    """Random token ids, int64 [count, length]."""
    return torch.cat([random_prompt(length, shape.vocab_size, seed) for seed in range(count)]).to(device)


def random_head(target: GenerativeModel, shape: ModelShape) -> Drafter:
    """An EAGLE-3 head of one layer with random weights: it costs what a trained one does."""
    vocabulary = min(_DRAFT_VOCABULARY, shape.vocab_size // 2)
    spec = EagleSpec(
        dialect="safeailab",
        version=3,
        draft_vocab_size=vocabulary,
        num_layers=1,
        feature_layers=(0, 1, shape.num_hidden_layers - 1),
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
    )
    with torch.device("meta"):
        head = EagleHead(spec, target.get_input_embeddings(), None)
    options: dict[str, Any] = {"dtype": target.dtype, "device": target.device}
    weights = {name: torch.empty(p.shape, **options).normal_(std=0.02) for name, p in head.named_parameters()}
    head.load_state_dict(weights, assign=True)
    head.rotary.to(target.device)
    head.requires_grad_(False).eval()
    ids = torch.arange(vocabulary, device=target.device)
    return EagleDrafter(LoadedHead(head, ids, LoadReport("random weights")), target)
