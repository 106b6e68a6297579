"""A target's embeddings and output matrix in any form: plain, packed, quantised, adapted, offloaded, wrapped.

A matrix that cannot be read is computed: an embedding from its tokens, a linear layer from unit vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hf_speculate.errors import TargetMismatchError

from .models import GenerativeModel


# Number of columns of an output matrix, and of embedding rows, computed at once.
_UNITS, _TOKENS = 64, 4096


def output_layer(model: GenerativeModel) -> Any:
    """The layer that holds a model's output matrix, also if it is wrapped by a module that casts or scales logits.

    Raises:
        TargetMismatchError: the model has no output layer, or one with several matrices.
    """
    if (output := model.get_output_embeddings()) is None:
        raise TargetMismatchError(
            f"{type(model).__name__} has no output layer, so no head can draft for it. Give the whole model, as "
            "AutoModelForCausalLM loads it."
        )
    return _with_matrix(output, "output layer", model)


def embedding_layer(model: GenerativeModel) -> Any:
    """The layer that holds a model's token embeddings, also if it is wrapped; raises like `output_layer`."""
    return _with_matrix(model.get_input_embeddings(), "embedding", model)


def _with_matrix(module: nn.Module, kind: str, model: GenerativeModel) -> nn.Module:
    layers = list(_matrix_holders(module))
    if len(layers) != 1:
        raise TargetMismatchError(
            f"the {kind} of {type(model).__name__} ({type(module).__name__}) holds {len(layers)} matrices, and a head "
            "shares one with its target. Give a model with one, alone or in a wrapper."
        )
    return layers[0]


def _matrix_holders(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules with a weight that is not a norm's; quantised weights may have any shape."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        for part in module.children():
            yield from _matrix_holders(part)
    elif weight.dim() > 1 or not weight.is_floating_point():
        yield module


def is_dense(module: Any) -> bool:
    """Whether a module is an ordinary linear layer: not quantised, adapted or offloaded."""
    weight = getattr(module, "weight", None)
    if type(module) is not nn.Linear or weight is None or weight.device.type == "meta":
        return False
    return weight.is_floating_point() and weight.ndim == 2


@torch.no_grad()
def output_rows(
    module: Any, hidden_size: int, dtype: torch.dtype, ids: Int[Tensor, " N"] | None = None
) -> Float[Tensor, "N H"]:
    """Rows of an output layer's matrix by token, without its bias; None gives all rows.

    Args:
        dtype: dtype of the states that the layer takes. Rows that must be computed have this dtype; others keep their
            own.
    """
    if is_dense(module):
        return module.weight if ids is None else module.weight[ids.to(module.weight.device)]
    device = module.weight.device
    units = torch.eye(hidden_size, dtype=dtype, device="cpu" if device.type == "meta" else device)
    constant = module(torch.zeros_like(units[:1]))
    chosen = slice(None) if ids is None else ids.to(constant.device)
    columns = [(module(block) - constant)[:, chosen] for block in units.split(_UNITS)]
    return torch.cat(columns).T


@torch.no_grad()
def embedding_rows(module: Any, vocab_size: int) -> Float[Tensor, "V H"]:
    """All rows of an embedding."""
    device = module.weight.device
    if isinstance(module, nn.Embedding) and device.type != "meta" and module.weight.is_floating_point():
        return module.weight
    ids = torch.arange(vocab_size, device="cpu" if device.type == "meta" else device, dtype=torch.long)
    return torch.cat([module(block) for block in ids.split(_TOKENS)])
