"""Medusa heads of every published layout, read with an account of every key and compared with their target.

- "fasterdecoding": `H.L.linear.{weight,bias}` for block L of head H, `H.<layers>.weight` for its output matrix. Three
  kinds of files: Medusa-1 (`medusa_lm_head.pt`), "version 2" (no output matrices: the target's serves all heads), and
  Medusa-2 (a whole causal LM with `medusa_head.` in front of these names; its backbone was trained too).
- "vllm": `blocks.H.layers.L.{weight,bias}`, `lm_heads.H.weight` or one matrix for all (`original_lm_head`), and
  `token_map` for a truncated vocabulary; perhaps `medusa_heads.` in front.

The tensors show what a file holds: published configs have no `model_type`, a wrong `medusa_num_heads`, and a
`medusa_fc_bias` that is off by default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.files import file_names
from hf_speculate.messages import get_logger
from hf_speculate.models import GenerativeModel

from ..checkpoints import (
    Checkpoint,
    ConfigValues,
    KeyAccount,
    LoadReport,
    check_stated_size,
    num_indexed,
    read_checkpoint,
    tensor_shapes,
)
from .head import MedusaHeads


logger = get_logger(__name__)


LayoutName = Literal["fasterdecoding", "vllm"]

# Prefixes that wrappers and layouts leave in front of names.
PREFIXES = ("module.", "_orig_mod.", "medusa_heads.", "medusa_head.")
_BACKBONE = ("model.", "lm_head.")
_NUM_PROBES = 4
# Relative (Frobenius). A cast fp16 -> bf16 -> fp32 differs by 0.2 %; merged fine-tunes differ by more than this.
_TOLERANCE = 0.01


@dataclass(frozen=True)
class Layout:
    """Names of one layout.

    Attributes:
        block_pattern: name of a block's matrix; the groups are head and layer.
        block: names a block by head and layer.
        output: names an output matrix by head and number of layers.
    """

    name: LayoutName
    block_pattern: re.Pattern
    block: Callable[[int, int], str]
    output: Callable[[int, int], str]


LAYOUTS = (
    Layout(
        name="fasterdecoding",
        block_pattern=re.compile(r"(\d+)\.(\d+)\.linear\.weight"),
        block=lambda head, layer: f"{head}.{layer}.linear",
        output=lambda head, num_layers: f"{head}.{num_layers}.weight",
    ),
    Layout(
        name="vllm",
        block_pattern=re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight"),
        block=lambda head, layer: f"blocks.{head}.layers.{layer}",
        output=lambda head, num_layers: f"lm_heads.{head}.weight",
    ),
)


def holds_heads(folder: str) -> bool:
    """Whether the weights in `folder` are named as in one of the layouts."""
    try:
        return find_layout(tensor_shapes(folder, strip=PREFIXES)) is not None
    except CheckpointError:
        # Broken, but named like a Medusa head: this drafter has to report what is wrong with it.
        return any(name.startswith("medusa_lm_head") for name in file_names(folder))


def find_layout(names: Collection[str]) -> Layout | None:
    for layout in LAYOUTS:
        if any(layout.block_pattern.fullmatch(name) for name in names):
            return layout
    return None


def check_backbone(target: GenerativeModel, backbone: Mapping[str, Tensor], folder: str) -> None:
    """Compares a few of the checkpoint's backbone weights with the target's.

    Medusa-2 trains the backbone together with the heads (arXiv:2401.10774, section 2.2.2) and publishes both in one
    checkpoint. On the model that it started from, such heads draft badly. Another target, and one whose weights cannot
    be compared (quantised), is logged once.

    Raises:
        TargetMismatchError: the target's weights have other shapes.
    """
    compared = 0
    for name, theirs in backbone.items():
        ours = _find_parameter(target, name)
        if ours is None or not ours.is_floating_point() or ours.device.type == "meta":
            continue
        if ours.shape != theirs.shape:
            raise TargetMismatchError(
                f"{folder} holds Medusa-2 heads and the backbone they were trained with; its {name} has shape "
                f"{tuple(theirs.shape)}, the target's {tuple(ours.shape)}. Load the target from that checkpoint."
            )
        ours, theirs = (tensor.detach().to("cpu", torch.float32) for tensor in (ours, theirs))
        difference = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
        if difference > _TOLERANCE:
            logger.warning_once(
                f"{folder} holds Medusa-2 heads and the backbone they were trained with, and the target is another "
                f"model or a quantised copy: {name} differs by {difference:.1%}. The text stays the target's own, but "
                "fewer drafts will be accepted. Load the target from that checkpoint."
            )
            return
        compared += 1
    if backbone and not compared:
        logger.warning_once(
            f"{folder} holds Medusa-2 heads; whether the target is the model they were trained with could not be "
            "checked, as its weights are quantised or named differently."
        )


def _find_parameter(target: GenerativeModel, name: str) -> Tensor | None:
    """The target's parameter, also where an adapter has been put around its layer."""
    module, _, leaf = name.rpartition(".")
    for candidate in (name, f"{module}.base_layer.{leaf}"):
        try:
            return target.get_parameter(candidate)
        except AttributeError:
            continue
    return None


@dataclass(frozen=True)
class MedusaCheckpoint:
    """Heads and everything else that was read with them.

    Attributes:
        heads: the heads, in the dtype of the file, on the CPU.
        config: `config.json`, raw.
        report: account of every tensor.
        backbone: a few tensors of the backbone that the heads were trained with, by name, when it is in the file.
    """

    heads: MedusaHeads
    config: dict[str, Any]
    report: LoadReport
    backbone: dict[str, Tensor] = field(default_factory=dict)


def read_heads(folder: str) -> MedusaCheckpoint:
    """Reads heads of any layout.

    Raises:
        CheckpointError: no such layout; missing, unknown or misshapen tensors; unreadable files; NaN weights.
    """
    shapes = tensor_shapes(folder, strip=PREFIXES)
    layout = find_layout(shapes)
    if layout is None:
        raise CheckpointError(f"{folder} has no Medusa heads: none of its tensors is named as in a Medusa layout.")
    probes = _choose_probes(shapes)

    def is_wanted(name: str) -> bool:
        return not probes or name in probes or not name.startswith(_BACKBONE)

    checkpoint = read_checkpoint(folder, strip=PREFIXES, only=is_wanted)
    keys = KeyAccount(checkpoint, f"Medusa, {layout.name} layout")
    for name in probes:
        keys.ignore(name, "backbone; compared with the target's")
    heads = _take_heads(checkpoint, layout, keys)
    backbone = {name: checkpoint.tensors[name] for name in probes}
    return MedusaCheckpoint(heads, checkpoint.config, keys.finish(), backbone)


def _choose_probes(shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """A few matrices across the backbone, small ones: enough to check that the target has the same weights."""
    matrices = [name for name, shape in shapes.items() if name.startswith(_BACKBONE[0]) and len(shape) == 2]
    if not matrices:
        return []
    smallest = min(shapes[name][0] * shapes[name][1] for name in matrices)
    alike = sorted(name for name in matrices if shapes[name][0] * shapes[name][1] == smallest)
    return alike[:: max(1, len(alike) // _NUM_PROBES)]


def _take_heads(checkpoint: Checkpoint, layout: Layout, keys: KeyAccount) -> MedusaHeads:
    """Head and layer counts are the largest indices that occur: a gap is then a missing tensor, not a smaller head."""
    blocks = [match for name in checkpoint.tensors if (match := layout.block_pattern.fullmatch(name))]
    num_tensors = len(checkpoint.tensors)  # there are at most so many blocks
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
    heads = MedusaHeads(
        torch.stack([torch.stack(row) for row in weights]),
        None if biases is None else torch.stack([torch.stack(row) for row in biases]),
        _stack_outputs(checkpoint.folder, outputs, token_ids),
        token_ids,
    )
    _check_stated_sizes(ConfigValues(checkpoint.folder, checkpoint.config), layout, heads)
    return heads


def _check_stated_sizes(config: ConfigValues, layout: Layout, heads: MedusaHeads) -> None:
    """Raises `CheckpointError` where config and weights contradict each other.

    FasterDecoding's configs count their own heads wrong: there they are not compared.
    """
    stated = {"hidden_size": heads.hidden_size}
    if heads.token_ids is None and heads.vocab_size is not None:
        stated["vocab_size"] = heads.vocab_size
    if layout.name == "vllm":
        stated |= {"num_heads": heads.num_heads, "num_hidden_layers": heads.num_layers}
        stated |= {"truncated_vocab_size": heads.vocab_size} if heads.vocab_size is not None else {}
    for key, found in stated.items():
        check_stated_size(config, key, found)


def _take_outputs(
    checkpoint: Checkpoint, layout: Layout, keys: KeyAccount, num_heads: int, num_layers: int, hidden_size: int
) -> list[Tensor]:
    """One output matrix a head, or one for all, or none."""
    names = [layout.output(head, num_layers) for head in range(num_heads)]
    present = [name for name in names if name in keys]
    config = ConfigValues(checkpoint.folder, checkpoint.config)
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
    """The output matrices [D, Vd, H]. With a `token_map` they may be full: only the mapped rows count (vLLM)."""
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
    """The `token_map`, which must hold *absolute* target ids (not offsets like EAGLE's `d2t`), each once."""
    if token_ids is None:
        return None
    token_ids = token_ids.long()
    if len(token_ids.unique()) != len(token_ids) or bool((token_ids < 0).any()):
        raise CheckpointError(f"{folder}: token_map must hold different, non-negative integers (absolute token ids).")
    return token_ids
