"""Medusa heads written in the published layouts, and turned from one into another, exactly."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from torch import Tensor

from hf_speculate.drafting import SavedHead
from hf_speculate.errors import CheckpointError, TargetMismatchError

from ..checkpoints import ConfigValues, LoadReport, TargetFiles, read_config, tensor_shapes, write_checkpoint
from ..heads import Written
from .head import MedusaHeads
from .loading import LAYOUTS, PREFIXES, read_heads, stated_layout


def write_heads(
    path: str | os.PathLike, heads: MedusaHeads, layout: str, *, vocab_size: int | None, base_model: str | None = None
) -> None:
    """Writes heads so that the projects of that layout, and `loading`, read them.

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
    if layout not in LAYOUTS:
        raise CheckpointError(f"medusa: unknown layout {layout!r}; known are {' and '.join(map(repr, LAYOUTS))}.")
    if layout == "fasterdecoding" and heads.token_ids is not None:
        raise CheckpointError("the fasterdecoding layout has no truncated vocabulary; use layout='vllm'.")
    if layout == "vllm" and heads.output_weight is None and not can_add_output:
        raise CheckpointError(
            "the vllm layout stores an output matrix and these heads use the target's: use layout='fasterdecoding'."
        )


def _tensors(heads: MedusaHeads, layout: str) -> dict[str, Tensor]:
    """Blocks and output matrices under the names of the layout; fasterdecoding's blocks always have biases."""
    names, outputs, biases = LAYOUTS[layout], heads.output_weight, heads.block_bias
    if layout == "fasterdecoding":
        biases = heads.block_weight.new_zeros(heads.block_weight.shape[:3]) if biases is None else biases
        outputs = None if outputs is None else outputs.expand(heads.num_heads, -1, -1)
    tensors = {}
    for head in range(heads.num_heads):
        for layer in range(heads.num_layers):
            name = names.block.format(head=head, layer=layer)
            tensors[f"{name}.weight"] = heads.block_weight[head, layer]
            if biases is not None:
                tensors[f"{name}.bias"] = biases[head, layer]
    for head, output in enumerate(() if outputs is None else outputs):
        tensors[names.output.format(head=head, num_layers=heads.num_layers)] = output
    return tensors


def _as_fasterdecoding(heads: MedusaHeads) -> Written:
    """Files of the project's trainers: `medusa_lm_head.pt`, or version 2 without output matrices."""
    config: dict[str, Any] = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_layers}
    tensors = _tensors(heads, "fasterdecoding")
    if heads.output_weight is None:
        return "medusa_lm_head.safetensors", tensors, config | {"version": "2"}
    return "medusa_lm_head.pt", tensors, config


def _as_vllm(heads: MedusaHeads, vocab_size: int | None) -> Written:
    """Files that vLLM's `MedusaModel` reads."""
    tensors, outputs = _tensors(heads, "vllm"), heads.output_weight
    assert outputs is not None  # `check_layout`
    if heads.token_ids is not None:
        tensors["token_map"] = heads.token_ids
    config = {
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
    }
    return "model.safetensors", tensors, config


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
        if target is None:
            raise CheckpointError(
                f"the heads in {folder} use the target's output matrix, which the vllm layout stores: give the target "
                "(--target)."
            )
        # In its own dtype, which may be another than that of the blocks.
        heads = heads.with_output(target.output_embeddings().weight.data[None])
    if checkpoint.backbone:
        lost = {"backbone": f"it was trained with the heads: they draft well only for the model in {folder}"}
        report = dataclasses.replace(report, missing={**report.missing, **lost})
    if target is not None:
        vocab_size = target.text_config.vocab_size
    elif "vocab_size" in config:
        vocab_size = config.size("vocab_size")
    else:
        vocab_size = heads.vocab_size if heads.token_ids is None else None
    write_heads(path, heads, layout, vocab_size=vocab_size, base_model=name)
    return SavedHead("medusa", layout, name), report


def describe_heads(folder: str) -> SavedHead:
    """Layout and target of the heads in `folder`, as far as it names them."""
    layout = stated_layout(folder, tensor_shapes(folder, strip=PREFIXES))
    return SavedHead("medusa", layout, ConfigValues(folder, read_config(folder)).text("base_model_name_or_path"))
