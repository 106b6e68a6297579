"""Published layouts of Medusa checkpoints: what their tensors are called.

- "fasterdecoding": `H.L.linear.{weight,bias}` for block L of head H, `H.<layers>.weight` for its output matrix. Three
  kinds of files: Medusa-1 (`medusa_lm_head.pt`), "version 2" (no output matrices: the target's serves all heads), and
  Medusa-2 (a whole causal LM with `medusa_head.` in front of these names; its backbone was trained too).
- "vllm": `blocks.H.layers.L.{weight,bias}`, `lm_heads.H.weight` or one matrix for all (`original_lm_head`), and
  `token_map` for a truncated vocabulary; perhaps `medusa_heads.` in front.

What there is is read off the tensors: published configs have no `model_type`, a wrong `medusa_num_heads`, and a
`medusa_fc_bias` that is off by default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from hf_speculate.errors import CheckpointError
from hf_speculate.files import file_names

from ...checkpoints import tensor_shapes


LayoutName = Literal["fasterdecoding", "vllm"]

# In front of names.
PREFIXES = ("module.", "_orig_mod.", "medusa_heads.", "medusa_head.")


@dataclass(frozen=True)
class Layout:
    """Names of one layout; `block` and `output` take head and layer (count)."""

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
        # Broken, but named as a Medusa head: it is ours to say what is wrong with it.
        return any(name.startswith("medusa_lm_head") for name in file_names(folder))


def find_layout(names: Collection[str]) -> Layout | None:
    for layout in LAYOUTS:
        if any(layout.block_pattern.fullmatch(name) for name in names):
            return layout
    return None
