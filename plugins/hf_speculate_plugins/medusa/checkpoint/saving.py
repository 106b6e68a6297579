"""Medusa heads written in a published layout, so that the projects of that layout load them."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from hf_speculate.errors import CheckpointError

from ...checkpoints import write_checkpoint
from ..head import MedusaHeads
from .layouts import LAYOUTS, Layout, LayoutName


# File name, tensors, config.
_Written = tuple[str, dict[str, Tensor], dict[str, Any]]


def write_heads(
    path: str | os.PathLike,
    heads: MedusaHeads,
    layout: LayoutName | str,
    *,
    vocab_size: int | None,
    base_model: str | None = None,
) -> None:
    """Writes heads so that the projects of that layout, and `loading`, read them.

    Args:
        vocab_size: the target's; None if unknown.
        base_model: name of the target, for the config.
    Raises:
        CheckpointError: the layout cannot express these heads.
    """
    check_layout(layout, heads)
    if layout == "vllm" and vocab_size is None:
        raise CheckpointError(
            "the vllm layout names the size of the target's vocabulary, and nothing here tells it: give the target."
        )
    file, tensors, config = _as_vllm(heads, vocab_size) if layout == "vllm" else _as_fasterdecoding(heads)
    if base_model:
        config["base_model_name_or_path"] = base_model
    write_checkpoint(path, file, _detached(tensors), config)


def check_layout(layout: str, heads: MedusaHeads, can_add_output: bool = False) -> None:
    """Raises `CheckpointError` unless `layout` can express these heads.

    Args:
        can_add_output: heads that use the target's output matrix may get a copy of it.
    """
    if layout not in ("fasterdecoding", "vllm"):
        raise CheckpointError(f"medusa: unknown layout {layout!r}; known are 'fasterdecoding' and 'vllm'.")
    if layout == "fasterdecoding" and heads.token_ids is not None:
        raise CheckpointError("the fasterdecoding layout has no truncated vocabulary; use layout='vllm'.")
    if layout == "vllm" and heads.output_weight is None and not can_add_output:
        raise CheckpointError(
            "the vllm layout stores an output matrix and these heads use the target's: use layout='fasterdecoding'."
        )


def _block_tensors(heads: MedusaHeads, layout: Layout, zero_bias: bool) -> dict[str, Tensor]:
    tensors = {}
    for head in range(heads.num_heads):
        for layer in range(heads.num_layers):
            name = layout.block(head, layer)
            tensors[f"{name}.weight"] = heads.block_weight[head, layer]
            if heads.block_bias is not None:
                tensors[f"{name}.bias"] = heads.block_bias[head, layer]
            elif zero_bias:
                tensors[f"{name}.bias"] = heads.block_weight.new_zeros(heads.hidden_size)
    return tensors


def _as_fasterdecoding(heads: MedusaHeads) -> _Written:
    """As the project's trainers write: `medusa_lm_head.pt`, or version 2 without output matrices."""
    layout = LAYOUTS[0]
    config: dict[str, Any] = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_layers}
    tensors = _block_tensors(heads, layout, zero_bias=True)
    if heads.output_weight is None:
        return "medusa_lm_head.safetensors", tensors, config | {"version": "2"}
    outputs = heads.output_weight.expand(heads.num_heads, -1, -1)
    tensors |= {layout.output(head, heads.num_layers): outputs[head] for head in range(heads.num_heads)}
    return "medusa_lm_head.pt", tensors, config


def _as_vllm(heads: MedusaHeads, vocab_size: int | None) -> _Written:
    """As vLLM's `MedusaModel` reads it."""
    layout, outputs = LAYOUTS[1], heads.output_weight
    assert outputs is not None  # `check_layout`
    tensors = _block_tensors(heads, layout, zero_bias=False)
    tensors |= {layout.output(head, heads.num_layers): output for head, output in enumerate(outputs)}
    if heads.token_ids is not None:
        tensors["token_map"] = heads.token_ids
    return (
        "model.safetensors",
        tensors,
        {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": heads.hidden_size,
            "vocab_size": vocab_size,
            "truncated_vocab_size": outputs.shape[1],
            "num_heads": heads.num_heads,
            "num_hidden_layers": heads.num_layers,
            "medusa_fc_bias": heads.block_bias is not None,
            "original_lm_head": outputs.shape[0] == 1 and heads.num_heads > 1,
            "max_paths": 64,
            "topk": 10,
            "torch_dtype": str(heads.dtype).removeprefix("torch."),
        },
    )


def _detached(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU that share no storage: a view would be saved with all of what it is a view of."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
