"""Matrices of a head that stay in the blocks of its GGUF file, for drafting on a CPU that has the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_speculate.scoring import output_rows


def keep_packed(head: nn.Module, packed: Mapping[str, Any]) -> None:
    """Replaces projections and output matrix by layers that stay packed, where the kernel can multiply with these.

    Everything else keeps the values that it was loaded with: rows of embeddings, and of a Markov head, are looked up.

    Args:
        head: head on its device, in its dtype.
        packed: matrices by the names of their tensors.
    """
    from hf_speculate_gguf.native import (  # and the package for packed targets
        NativeBackend,
        PackedLinear,
        choose_backend,
    )

    first = next(head.parameters())
    backend = choose_backend("auto", first.device, first.dtype) if first.device.type == "cpu" else None
    if not isinstance(backend, NativeBackend):
        return
    for name, module in list(head.named_modules()):
        matrix = packed.get(f"{name}.weight")
        is_projection = name in ("fc", "lm_head") or name.startswith("layers.")
        if matrix is None or not is_projection or type(module) is not nn.Linear:
            continue
        tiles = backend.pack(matrix, first.device)
        bias = None if module.bias is None else module.bias.data
        layer = PackedLinear(matrix.num_columns, matrix.num_rows, matrix.type, backend, tiles, bias)
        parent, _, attribute = name.rpartition(".")
        setattr(head.get_submodule(parent), attribute, layer.eval())


@torch.no_grad()
def dense_state(head: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state of a head with values in place of packed bytes.

    Args:
        dtype: dtype of the head.
    """
    found = dict(head.state_dict())
    for name, module in head.named_modules():
        layer: Any = module
        if f"{name}.weight" in found and not found[f"{name}.weight"].is_floating_point():
            found[f"{name}.weight"] = output_rows(layer, layer.in_features, dtype)
    return found
