"""A cache of random entries, for tests and measurements that cannot wait for a prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..cache import as_cache
from .devices import input_device
from .models import GenerativeModel


def filler_cache(model: GenerativeModel, batch_size: int, length: int) -> DynamicCache:
    """A cache of random entries, the same at every call, with the shapes and scale of the model's own.

    All layers must keep keys and values of every token (`hf_speculate.cache.is_indexable`).
    """
    first, cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
    tokens = torch.zeros(batch_size, 1, dtype=torch.long, device=input_device(model))
    with torch.no_grad():
        model(tokens, **as_cache(first), use_cache=True, logits_to_keep=1)
    generator = torch.Generator().manual_seed(2)
    layers: list[Any] = first.layers
    for index, layer in enumerate(layers):
        keys, values = (_like(states, length, generator) for states in (layer.keys, layer.values))
        cache.update(keys, values, index)
    return cache


def _like(states: Tensor, length: int, generator: torch.Generator) -> Tensor:
    found = torch.randn(
        *states.shape[:2], length, states.shape[3], generator=generator, dtype=torch.float32, device="cpu"
    )
    return (found * states.float().std().cpu()).to(states.device, states.dtype)
