"""Meanings of absent keys in the configs of EAGLE heads, by layout and kind.

Each is that of the code that writes a layout, or of its first reader: SafeAILab's EAGLE at cb7e0841, speculators 0.1 to
0.9 (the fields of its config classes, alike in all versions that have them), vLLM for configs of speculators' layout
that other programs wrote, SpecForge 0.2.0, DeepSpec, ModelOpt 0.47.0, NeMo Automodel at 36044ad3, llama.cpp b11549.
Keys that a layout must have are not listed. The tensors decide biases, norms of the features, and whether the output
matrix is the head's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .spec import Dialect


Defaults = Mapping[str, Any]

_PLAIN: Defaults = {"norm_before_residual": False}
_SPECULATORS: Defaults = {"norm_before_residual": False, "norm_output": False}

DEFAULTS: Mapping[Dialect, Defaults] = {
    "eagle1": {},
    "safeailab": _PLAIN,
    "specforge": {**_PLAIN, "norm_output": True},
    "speculators": _SPECULATORS,
    "deepspec": _PLAIN,
    "modelopt": {**_PLAIN, "norm_output": False, "return_hidden_post_norm": False},
    "vllm": {**_PLAIN, "norm_output": False},
    "llama.cpp": {**_PLAIN, "norm_before_fc": False},
}
# EAGLE-3 in speculators' layout by another program.
UNSIGNED: Defaults = {**_SPECULATORS, "norm_before_residual": True}
