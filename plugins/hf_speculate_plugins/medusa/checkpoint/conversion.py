"""Medusa heads from one published layout to another, exactly: no target model is loaded, tensors keep their dtype."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from hf_speculate.drafting import SavedHead
from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.files import read_json

from ...checkpoints import ConfigValues, LoadReport, TargetFiles, tensor_shapes
from ..head import MedusaHeads
from .layouts import PREFIXES, find_layout
from .loading import read_heads
from .saving import check_layout, write_heads


def convert_heads(
    folder: str, path: str | os.PathLike, layout: str, target: TargetFiles | None = None
) -> tuple[SavedHead, LoadReport]:
    """Writes the heads in `folder` to the folder `path` in `layout`.

    Args:
        target: needed for "vllm" where the heads use the target's output matrix, which that layout stores, and where a
            truncated vocabulary does not tell the size of the target's.
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
    """Layout and target of the heads in `folder`, as far as it says."""
    layout = find_layout(tensor_shapes(folder, strip=PREFIXES))
    if layout is None:
        raise CheckpointError(f"{folder} has no Medusa heads: none of its tensors is named as in a Medusa layout.")
    path = Path(folder, "config.json")
    config = ConfigValues(folder, read_json(path) if path.exists() else {})
    return SavedHead("medusa", layout.name, config.text("base_model_name_or_path"))


def _with_output(heads: MedusaHeads, folder: str, target: TargetFiles | None) -> MedusaHeads:
    """The same heads with a copy of the target's output matrix, one for all."""
    if target is None:
        raise CheckpointError(
            f"the heads in {folder} use the target's output matrix, which the vllm layout stores: give the target "
            "(--target)."
        )
    weight = target.output_embeddings().weight  # in its own dtype, which may be another than that of the blocks
    bias = None if heads.block_bias is None else heads.block_bias.data
    return MedusaHeads(heads.block_weight.data, bias, weight.data[None])


def _vocab_size(heads: MedusaHeads, config: ConfigValues, target: TargetFiles | None) -> int | None:
    """The target's; None where nothing tells, which only truncated vocabularies mind."""
    if target is not None:
        return target.text_config.vocab_size
    if "vocab_size" in config:
        return config.size("vocab_size")
    return heads.vocab_size if heads.token_ids is None else None
