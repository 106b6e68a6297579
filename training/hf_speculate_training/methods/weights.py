"""Weights that are handed over: from the target to a fresh head, from a head in training to one that decodes."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.target import output_rows


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def detached_copy(module: AnyModule, dtype: torch.dtype) -> AnyModule:
    """A module for decoding around the same weights: parameters detached and cast, buffers as they are.

    `copy.deepcopy` would copy the target's modules that a head refers to, and hold both sets of weights at once.
    """
    placed = {id(p): nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in module.parameters()}
    return _rebuilt(module, placed).eval()


def trainable(head: AnyModule) -> AnyModule:
    """A loaded head made ready to be trained on: parameters in float32, with gradients."""
    for parameter in head.parameters():
        parameter.data = parameter.data.float()
    return head.requires_grad_(True)


def initialise(head: nn.Module, std: float) -> None:
    """Normal weights as the target's own; norms are ones already."""
    for module in head.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def target_rows(target: PreTrainedModel, ids: Int[Tensor, " N"] | None = None) -> Float[Tensor, "N Ht"]:
    """Rows of the target's output matrix, whatever it is kept in; None: all."""
    size = target.config.get_text_config(decoder=True).hidden_size
    return output_rows(target.get_output_embeddings(), size, target.dtype, ids)


@torch.no_grad()
def copy_rows(weight: Float[Tensor, "N Hd"], rows: Float[Tensor, "N Ht"]) -> None:
    """Begins with rows of the target's matrix; of another width, with their projection on its main directions."""
    rows = rows.to(weight.device, torch.float32)
    if rows.shape[1] != weight.shape[1]:
        directions = torch.linalg.eigh(rows.mT @ rows).eigenvectors.flip(1)[:, : weight.shape[1]]
        rows = rows @ directions
    weight[:, : rows.shape[1]] = rows


def _rebuilt(module: Any, placed: dict[int, nn.Parameter]) -> Any:
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {name: None if p is None else placed[id(p)] for name, p in module._parameters.items()}
    twin._buffers = dict(module._buffers)
    twin._modules = {name: None if m is None else _rebuilt(m, placed) for name, m in module._modules.items()}
    return twin
