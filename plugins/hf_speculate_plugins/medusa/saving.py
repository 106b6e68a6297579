"""Medusa heads written in the published layouts, and turned from one into another, exactly."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from torch import Tensor

from hf_speculate.drafting import SavedHead
from hf_speculate.errors import CheckpointError, TargetMismatchError

from ..checkpoints import ConfigValues, LoadReport, TargetFiles, read_config, tensor_shapes, write_checkpoint
from .head import MedusaHeads
from .loading import LAYOUTS, PREFIXES, Layout, LayoutName, find_layout, read_heads


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
        vocab_size: size of the target's vocabulary; None if unknown.
        base_model: name of the target, for the config.
    Raises:
        CheckpointError: the layout cannot express these heads.
    """
    check_layout(layout, heads)
    if layout == "vllm" and vocab_size is None:
        raise CheckpointError(
            "the vllm layout holds the size of the target's vocabulary, which is not known here: give the target."
        )
    file, tensors, config = _as_vllm(heads, vocab_size) if layout == "vllm" else _as_fasterdecoding(heads)
    if base_model:
        config["base_model_name_or_path"] = base_model
    write_checkpoint(path, file, tensors, config)


def check_layout(layout: str, heads: MedusaHeads, can_add_output: bool = False) -> None:
    """Raises `CheckpointError` unless `layout` can express these heads.

    Args:
        can_add_output: whether heads that use the target's output matrix may get a copy of it.
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
    """Files of the project's trainers: `medusa_lm_head.pt`, or version 2 without output matrices."""
    layout = LAYOUTS[0]
    config: dict[str, Any] = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_layers}
    tensors = _block_tensors(heads, layout, zero_bias=True)
    if heads.output_weight is None:
        return "medusa_lm_head.safetensors", tensors, config | {"version": "2"}
    outputs = heads.output_weight.expand(heads.num_heads, -1, -1)
    tensors |= {layout.output(head, heads.num_layers): outputs[head] for head in range(heads.num_heads)}
    return "medusa_lm_head.pt", tensors, config


def _as_vllm(heads: MedusaHeads, vocab_size: int | None) -> _Written:
    """Files that vLLM's `MedusaModel` reads."""
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
            "vocab_size": outputs.shape[1] if heads.token_ids is None else vocab_size,
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


def convert_heads(
    folder: str, path: str | os.PathLike, layout: str, target: TargetFiles | None = None
) -> tuple[SavedHead, LoadReport]:
    """Writes the heads in `folder` to the folder `path` in `layout`.

    Args:
        target: files of the target. "vllm" needs them for heads that use the target's output matrix, which that layout
            stores, and where a truncated vocabulary hides the size of the target's.
    Raises:
        CheckpointError: unreadable; the layout cannot express the heads; the target is needed and was not given.
        TargetMismatchError: the target is another one.
    """
    checkpoint = read_heads(folder)
    heads, report = checkpoint.heads, checkpoint.report
    config = ConfigValues(folder, checkpoint.config)
    name = target.name if target else config.text("base_model_name_or_path")
    check_layout(layout, heads, can_add_output=True)
    if target is not None and target.text_config.hidden_size != heads.hidden_size:
        raise TargetMismatchError(
            f"the Medusa heads take hidden states of size {heads.hidden_size}, those of {target.name} have "
            f"{target.text_config.hidden_size}: they belong to another model."
        )
    if layout == "vllm" and heads.output_weight is None:
        heads = _with_output(heads, folder, target)
    if checkpoint.backbone:
        lost = {"backbone": f"it was trained with the heads: they draft well only for the model in {folder}"}
        report = dataclasses.replace(report, missing={**report.missing, **lost})
    write_heads(path, heads, layout, vocab_size=_vocab_size(heads, config, target), base_model=name)
    return SavedHead("medusa", layout, name), report


def describe_heads(folder: str) -> SavedHead:
    """Layout and target of the heads in `folder`, as far as it names them."""
    layout = find_layout(tensor_shapes(folder, strip=PREFIXES))
    if layout is None:
        raise CheckpointError(f"{folder} has no Medusa heads: none of its tensors is named as in a Medusa layout.")
    config = ConfigValues(folder, read_config(folder))
    return SavedHead("medusa", layout.name, config.text("base_model_name_or_path"))


def _with_output(heads: MedusaHeads, folder: str, target: TargetFiles | None) -> MedusaHeads:
    """The same heads with a copy of the target's output matrix, one for all."""
    if target is None:
        raise CheckpointError(
            f"the heads in {folder} use the target's output matrix, which the vllm layout stores: give the target "
            "(--target)."
        )
    # In its own dtype, which may be another than that of the blocks.
    return heads.with_output(target.output_embeddings().weight.data[None])


def _vocab_size(heads: MedusaHeads, config: ConfigValues, target: TargetFiles | None) -> int | None:
    """Size of the target's vocabulary; None where it is unknown, which matters for truncated vocabularies only."""
    if target is not None:
        return target.text_config.vocab_size
    if "vocab_size" in config:
        return config.size("vocab_size")
    return heads.vocab_size if heads.token_ids is None else None
