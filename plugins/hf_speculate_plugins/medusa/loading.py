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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.messages import get_logger
from hf_speculate.target import GenerativeModel

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


# Prefixes that wrappers and layouts leave in front of names.
PREFIXES = ("module.", "_orig_mod.", "medusa_heads.", "medusa_head.")
_BACKBONE = ("model.", "lm_head.")
_NUM_PROBES = 4
# Relative (Frobenius). A cast fp16 -> bf16 -> fp32 differs by 0.2 %; merged fine-tunes differ by more than this.
_TOLERANCE = 0.01


class Layout(NamedTuple):
    """Names of tensors in one layout: matrices of blocks as a pattern of (head, layer); blocks; output matrices."""

    pattern: re.Pattern[str]
    block: str
    output: str


LAYOUTS = {
    "fasterdecoding": Layout(
        re.compile(r"(\d+)\.(\d+)\.linear\.weight"), "{head}.{layer}.linear", "{head}.{num_layers}.weight"
    ),
    "vllm": Layout(
        re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight"), "blocks.{head}.layers.{layer}", "lm_heads.{head}.weight"
    ),
}


def layout_of(names: Collection[str]) -> str | None:
    """The layout of tensors of these names, without prefixes; None if they are not Medusa heads."""
    layout_names = (name for name, layout in LAYOUTS.items() if any(map(layout.pattern.fullmatch, names)))
    return next(layout_names, None)


def stated_layout(folder: str, names: Collection[str]) -> str:
    """`layout_of` the tensors in a folder; raises `CheckpointError` if they are not Medusa heads."""
    if layout := layout_of(names):
        return layout
    raise CheckpointError(f"{folder} has no Medusa heads: none of its tensors is named as in a Medusa layout.")


def check_backbone(target: GenerativeModel, backbone: Mapping[str, Tensor], folder: str) -> None:
    """Compares a few of the checkpoint's backbone weights with the target's.

    Medusa-2 trains the backbone together with the heads (arXiv:2401.10774, section 2.2.2) and publishes both in one
    checkpoint. On the model that it started from, such heads draft badly. Another target, and one whose weights cannot
    be compared (quantised), is logged once.

    Raises:
        TargetMismatchError: the target's weights have other shapes.
    """
    whose = f"{folder} holds Medusa-2 heads and the backbone they were trained with"
    parameters = dict(target.named_parameters())
    pairs = [(name, theirs, _parameter(parameters, name)) for name, theirs in backbone.items()]
    known = [(name, theirs, ours) for name, theirs, ours in pairs if ours is not None]
    for name, theirs, ours in known:
        if ours.shape != theirs.shape:
            raise TargetMismatchError(
                f"{whose}; its {name} has shape {tuple(theirs.shape)}, the target's {tuple(ours.shape)}. Load the "
                "target from that checkpoint."
            )
        ours, theirs = (tensor.detach().to("cpu", torch.float32) for tensor in (ours, theirs))
        difference = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
        if difference > _TOLERANCE:
            logger.warning_once(
                f"{whose}, and the target is another model or a quantised copy: {name} differs by {difference:.1%}. "
                "The text stays the target's own, but fewer drafts will be accepted. Load the target from that "
                "checkpoint."
            )
            return
    if backbone and not known:
        logger.warning_once(
            f"{whose}; whether the target is that model could not be checked, as its weights are quantised or named "
            "differently."
        )


def _parameter(parameters: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The target's parameter, also inside an adapter; None if its values cannot be read."""
    module, _, leaf = name.rpartition(".")
    parameter = parameters.get(name, parameters.get(f"{module}.base_layer.{leaf}"))
    is_readable = parameter is not None and parameter.is_floating_point() and parameter.device.type != "meta"
    return parameter if is_readable else None


@dataclass(frozen=True)
class MedusaCheckpoint:
    """Heads and everything else that was read with them.

    Attributes:
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
    layout = stated_layout(folder, shapes)
    probes = _choose_probes(shapes)

    def is_wanted(name: str) -> bool:
        return not probes or name in probes or not name.startswith(_BACKBONE)

    checkpoint = read_checkpoint(folder, strip=PREFIXES, only=is_wanted)
    keys = KeyAccount(checkpoint, f"Medusa, {layout} layout")
    for name in probes:
        keys.ignore(name, "backbone; compared with the target's")
    heads = _take_heads(checkpoint, layout, keys)
    backbone = {name: checkpoint.tensors[name] for name in probes}
    return MedusaCheckpoint(heads, checkpoint.config, keys.finish(), backbone)


def _choose_probes(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """A few of the smallest matrices across the backbone: enough to check that the target has the same weights."""
    sizes = {n: s[0] * s[1] for n, s in shapes.items() if n.startswith(_BACKBONE[0]) and len(s) == 2}
    alike = sorted(name for name, size in sizes.items() if size == min(sizes.values()))
    return alike[:: max(1, len(alike) // _NUM_PROBES)]


def _take_heads(checkpoint: Checkpoint, layout: str, keys: KeyAccount) -> MedusaHeads:
    """Head and layer counts are the largest indices that occur: a gap is then a missing tensor, not a smaller head."""
    folder, names = checkpoint.folder, LAYOUTS[layout]
    blocks = [match for name in checkpoint.tensors if (match := names.pattern.fullmatch(name))]
    num_tensors = len(checkpoint.tensors)  # there are at most so many blocks
    num_heads = num_indexed(folder, "Medusa head", [match[1] for match in blocks], num_tensors)
    num_layers = num_indexed(folder, "block", [match[2] for match in blocks], max(num_tensors // num_heads, 1))
    shape = checkpoint.tensors[blocks[0].string].shape
    if len(shape) != 2:
        raise CheckpointError(f"{folder}: {blocks[0].string} has shape {tuple(shape)}, no square matrix.")
    size = shape[-1]
    of_heads = [
        [names.block.format(head=head, layer=layer) for layer in range(num_layers)] for head in range(num_heads)
    ]
    weights = [[keys.take(f"{name}.weight", (size, size)) for name in row] for row in of_heads]
    biases = None
    if any(f"{name}.bias" in keys for row in of_heads for name in row):
        biases = [[keys.take(f"{name}.bias", (size,)) for name in row] for row in of_heads]
    config = ConfigValues(folder, checkpoint.config)
    outputs = [keys.take(name, (None, size)) for name in _outputs(config, layout, keys, num_heads, num_layers)]
    if not outputs:
        keys.absent("output matrices", "the target's lm_head serves all heads")
    token_ids = keys.optional_ids("token_map", (None,)) if layout == "vllm" else None
    keys.finish()  # raises here if anything is missing: there is nothing to stack then
    token_ids = _checked_token_ids(folder, token_ids)
    heads = MedusaHeads(
        torch.stack([torch.stack(row) for row in weights]),
        None if biases is None else torch.stack([torch.stack(row) for row in biases]),
        _stacked_outputs(folder, outputs, token_ids),
        token_ids,
    )
    _check_stated_sizes(config, layout, heads)
    return heads


def _check_stated_sizes(config: ConfigValues, layout: str, heads: MedusaHeads) -> None:
    """Raises `CheckpointError` where config and weights contradict each other."""
    stated = {"hidden_size": heads.hidden_size, "vocab_size": heads.vocab_size if heads.token_ids is None else None}
    if layout == "vllm":  # FasterDecoding's configs count their own heads wrong
        stated |= {"num_heads": heads.num_heads, "num_hidden_layers": heads.num_layers}
        stated |= {"truncated_vocab_size": heads.vocab_size}
    for key, size in stated.items():
        if size is not None:
            check_stated_size(config, key, size)


def _outputs(config: ConfigValues, layout: str, keys: KeyAccount, num_heads: int, num_layers: int) -> list[str]:
    """Names of the output matrices: one for each head, or one for all, or none."""
    names = [LAYOUTS[layout].output.format(head=head, num_layers=num_layers) for head in range(num_heads)]
    present = [name for name in names if name in keys]
    if layout == "fasterdecoding":
        return names if present else []
    if config.flag("original_lm_head", False) and len(present) < 2:
        return [*present, *(["lm_head.weight"] if "lm_head.weight" in keys else [])]
    return names


def _stacked_outputs(folder: str, outputs: list[Tensor], token_ids: Tensor | None) -> Tensor | None:
    """The output matrices [D, Vd, H]. With a `token_map` they may be full: only the mapped rows count (vLLM)."""
    if not outputs:
        return None
    num_rows, *others = sorted({len(output) for output in outputs})
    if others:
        raise CheckpointError(f"{folder}: output matrices of different vocabularies: {[num_rows, *others]} rows.")
    if token_ids is not None and len(token_ids) != num_rows:
        if len(token_ids) > num_rows or int(token_ids.max()) >= num_rows:
            raise CheckpointError(
                f"{folder}: token_map names {len(token_ids)} tokens up to {int(token_ids.max())}, output matrices have "
                f"{num_rows} rows."
            )
        outputs = [output[token_ids] for output in outputs]
    return torch.stack(outputs)


def _checked_token_ids(folder: str, token_ids: Tensor | None) -> Tensor | None:
    """The `token_map`, which must hold *absolute* target ids (not offsets like EAGLE's `d2t`), each once."""
    if token_ids is None:
        return None
    token_ids = token_ids.long()
    if len(token_ids.unique()) != len(token_ids) or bool((token_ids < 0).any()):
        raise CheckpointError(f"{folder}: token_map must hold different, non-negative integers (absolute token ids).")
    return token_ids
