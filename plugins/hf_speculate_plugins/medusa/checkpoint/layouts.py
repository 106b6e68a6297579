"""Published layouts of Medusa checkpoints: recognising, reading and writing them.

- "fasterdecoding": `H.L.linear.{weight,bias}` for block L of head H, `H.<layers>.weight` for its output matrix. Three
  kinds of files: Medusa-1 (`medusa_lm_head.pt`), "version 2" (no output matrices: the target's serves all heads), and
  Medusa-2 (a whole causal LM with `medusa_head.` in front of these names; its backbone was trained too).
- "vllm": `blocks.H.layers.L.{weight,bias}`, `lm_heads.H.weight` or one matrix for all (`original_lm_head`), and
  `token_map` for a truncated vocabulary; perhaps `medusa_heads.` in front.

What there is is read off the tensors: published configs have no `model_type`, a wrong `medusa_num_heads`, and a
`medusa_fc_bias` that is off by default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hf_speculate.errors import CheckpointError
from hf_speculate.files import file_names

from ...checkpoints.config import Values
from ...checkpoints.reading import Checkpoint, KeyAccount, LoadReport, num_indexed, read_checkpoint, tensor_shapes
from ...checkpoints.weight_files import write_checkpoint
from ..head import MedusaHeads


LayoutName = Literal["fasterdecoding", "vllm"]

# File name, tensors, config.
_Written = tuple[str, dict[str, Tensor], dict[str, Any]]

_STRIP = ("module.", "_orig_mod.", "medusa_heads.", "medusa_head.")
_BACKBONE = ("model.", "lm_head.")
_NUM_PROBES = 4


@dataclass(frozen=True)
class _Layout:
    """Names of one layout; `block` and `output` take head and layer (count)."""

    name: LayoutName
    block_pattern: re.Pattern
    block: Callable[[int, int], str]
    output: Callable[[int, int], str]


_LAYOUTS = (
    _Layout(
        name="fasterdecoding",
        block_pattern=re.compile(r"(\d+)\.(\d+)\.linear\.weight"),
        block=lambda head, layer: f"{head}.{layer}.linear",
        output=lambda head, num_layers: f"{head}.{num_layers}.weight",
    ),
    _Layout(
        name="vllm",
        block_pattern=re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight"),
        block=lambda head, layer: f"blocks.{head}.layers.{layer}",
        output=lambda head, num_layers: f"lm_heads.{head}.weight",
    ),
)


@dataclass(frozen=True)
class MedusaCheckpoint:
    """Heads as they were read.

    Attributes:
        heads: in the dtype of the file, on the CPU.
        config: `config.json`, raw.
        report: what became of every tensor.
        backbone: a few tensors of the backbone that the heads were trained with, by name, when it is in the file.
    """

    heads: MedusaHeads
    config: dict[str, Any]
    report: LoadReport
    backbone: dict[str, Tensor] = field(default_factory=dict)


def recognizes(folder: str) -> bool:
    """Whether the weights in `folder` are named as in one of the layouts."""
    try:
        return _find_layout(tensor_shapes(folder, strip=_STRIP)) is not None
    except CheckpointError:
        # Broken, but named as a Medusa head: it is ours to say what is wrong with it.
        return any(name.startswith("medusa_lm_head") for name in file_names(folder))


def read_heads(folder: str) -> MedusaCheckpoint:
    """Reads heads of any layout.

    Raises:
        CheckpointError: no such layout; missing, unknown or misshapen tensors; unreadable files; NaN weights.
    """
    shapes = tensor_shapes(folder, strip=_STRIP)
    layout = _find_layout(shapes)
    if layout is None:
        raise CheckpointError(f"{folder} has no Medusa heads: none of its tensors is named as in a Medusa layout.")
    probes = _choose_probes(shapes)

    def is_wanted(name: str) -> bool:
        return not probes or name in probes or not name.startswith(_BACKBONE)

    checkpoint = read_checkpoint(folder, strip=_STRIP, only=is_wanted)
    keys = KeyAccount(checkpoint, f"Medusa, {layout.name} layout")
    for name in probes:
        keys.ignore(name, "backbone; compared with the target's")
    heads = _take_heads(checkpoint, layout, keys)
    backbone = {name: checkpoint.tensors[name] for name in probes}
    return MedusaCheckpoint(heads, checkpoint.config, keys.finish(), backbone)


def write_heads(
    path: str | os.PathLike,
    heads: MedusaHeads,
    layout: LayoutName | str,
    *,
    vocab_size: int | None,
    base_model: str | None = None,
) -> None:
    """Writes heads so that the projects of that layout, and `read_heads`, load them.

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


def _find_layout(names: Collection[str]) -> _Layout | None:
    for layout in _LAYOUTS:
        if any(layout.block_pattern.fullmatch(name) for name in names):
            return layout
    return None


def _choose_probes(shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """A few matrices across the backbone, small ones: enough to tell whether the target has the same weights."""
    matrices = [name for name, shape in shapes.items() if name.startswith(_BACKBONE[0]) and len(shape) == 2]
    if not matrices:
        return []
    smallest = min(shapes[name][0] * shapes[name][1] for name in matrices)
    alike = sorted(name for name in matrices if shapes[name][0] * shapes[name][1] == smallest)
    return alike[:: max(1, len(alike) // _NUM_PROBES)]


def _take_heads(checkpoint: Checkpoint, layout: _Layout, keys: KeyAccount) -> MedusaHeads:
    """Head and layer counts are the largest indices that occur: a gap is then a missing tensor, not a smaller head."""
    blocks = [match for name in checkpoint.tensors if (match := layout.block_pattern.fullmatch(name))]
    num_tensors = len(checkpoint.tensors)  # there are no more blocks than that
    num_heads = num_indexed(checkpoint.folder, "Medusa head", [match[1] for match in blocks], num_tensors)
    most = max(num_tensors // num_heads, 1)
    num_layers = num_indexed(checkpoint.folder, "block", [match[2] for match in blocks], most)
    shape = checkpoint.tensors[blocks[0].string].shape
    if len(shape) != 2:
        raise CheckpointError(f"{checkpoint.folder}: {blocks[0].string} has shape {tuple(shape)}, no square matrix.")
    hidden_size = shape[-1]
    names = [[layout.block(h, layer) for layer in range(num_layers)] for h in range(num_heads)]
    weights = [[keys.take(f"{name}.weight", (hidden_size, hidden_size)) for name in row] for row in names]
    biases = None
    if any(f"{name}.bias" in keys for row in names for name in row):
        biases = [[keys.take(f"{name}.bias", (hidden_size,)) for name in row] for row in names]
    outputs = _take_outputs(checkpoint, layout, keys, num_heads, num_layers, hidden_size)
    token_ids = keys.optional_ids("token_map", (None,)) if layout.name == "vllm" else None
    keys.finish()  # raises here if anything is missing: there is nothing to stack then
    token_ids = _checked_token_ids(checkpoint.folder, token_ids)
    return MedusaHeads(
        torch.stack([torch.stack(row) for row in weights]),
        None if biases is None else torch.stack([torch.stack(row) for row in biases]),
        _stack_outputs(checkpoint.folder, outputs, token_ids),
        token_ids,
    )


def _take_outputs(
    checkpoint: Checkpoint, layout: _Layout, keys: KeyAccount, num_heads: int, num_layers: int, hidden_size: int
) -> list[Tensor]:
    """One output matrix a head, or one for all, or none."""
    names = [layout.output(head, num_layers) for head in range(num_heads)]
    present = [name for name in names if name in keys]
    config = Values(checkpoint.folder, checkpoint.config)
    if layout.name == "vllm" and config.flag("original_lm_head", False) and len(present) < 2:
        present.extend(["lm_head.weight"] if "lm_head.weight" in keys else [])
        names = present
    elif layout.name == "fasterdecoding" and not present:
        names = []
    if not names:
        keys.absent("output matrices", "the target's lm_head serves all heads")
    outputs = [keys.take(name, (None, hidden_size)) for name in names]
    rows = {len(output) for output in outputs if output.device.type != "meta"}
    if len(rows) > 1:
        raise CheckpointError(f"{checkpoint.folder}: output matrices of different vocabularies: {sorted(rows)} rows.")
    return outputs


def _stack_outputs(folder: str, outputs: list[Tensor], token_ids: Tensor | None) -> Tensor | None:
    """[D, Vd, H]. Full matrices beside a `token_map` are allowed: the mapped rows are what counts (vLLM)."""
    if not outputs:
        return None
    num_rows = len(outputs[0])
    if token_ids is not None and len(token_ids) < num_rows:
        if int(token_ids.max()) >= num_rows:
            raise CheckpointError(f"{folder}: token_map names token {int(token_ids.max())} of {num_rows}.")
        outputs = [output[token_ids] for output in outputs]
    elif token_ids is not None and len(token_ids) > num_rows:
        raise CheckpointError(f"{folder}: token_map names {len(token_ids)} tokens, output matrices {num_rows}.")
    return torch.stack(outputs)


def _checked_token_ids(folder: str, token_ids: Tensor | None) -> Tensor | None:
    """`token_map` holds *absolute* target ids (not offsets as EAGLE's `d2t`), each once."""
    if token_ids is None:
        return None
    token_ids = token_ids.long()
    if len(token_ids.unique()) != len(token_ids) or bool((token_ids < 0).any()):
        raise CheckpointError(f"{folder}: token_map must hold different, non-negative integers (absolute token ids).")
    return token_ids


def _block_tensors(heads: MedusaHeads, layout: _Layout, zero_bias: bool) -> dict[str, Tensor]:
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
    layout = _LAYOUTS[0]
    config: dict[str, Any] = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_layers}
    tensors = _block_tensors(heads, layout, zero_bias=True)
    if heads.output_weight is None:
        return "medusa_lm_head.safetensors", tensors, config | {"version": "2"}
    outputs = heads.output_weight.expand(heads.num_heads, -1, -1)
    tensors |= {layout.output(head, heads.num_layers): outputs[head] for head in range(heads.num_heads)}
    return "medusa_lm_head.pt", tensors, config


def _as_vllm(heads: MedusaHeads, vocab_size: int | None) -> _Written:
    """As vLLM's `MedusaModel` reads it."""
    layout, outputs = _LAYOUTS[1], heads.output_weight
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
