"""Meanings of absent keys in configs, by layout and method.

Each is that of the code that writes a layout, or of its first reader: speculators 0.5 to 0.9 (the fields of its config
classes, alike in all versions that have them), z-lab's dflash 0.1.0 and NeMo Automodel's reader of DFlash2, SpecForge
0.2.0, ModelOpt 0.47.0, DeepSpec with vLLM, SGLang 0.5.23 (LiLiCorr), llama.cpp b11549. Keys that a layout must have are
not listed, nor those that the tensors decide. None: the key has a meaning only where it is stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .spec import Dialect, Method


Defaults = Mapping[str, Any]

_VANILLA: Defaults = {"markov_head_type": "vanilla"}
_NO_MARKOV: Defaults = {**_VANILLA, "markov_rank": 0, "confidence_head_with_markov": False}
_OF_SELECTOR: Defaults = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
# Which slots see which: without any of these, layers with a window are causal and others are not.
CAUSALITY: Defaults = dict.fromkeys(("causal", "causal_head", "dflash_query_causal", "is_causal"))
_LOGITS: Defaults = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}

_ZLAB = {**CAUSALITY, **_LOGITS, **_NO_MARKOV, "block_size": 16, "sample_from_anchor": False}
_DEEPSPEC = {**CAUSALITY, **_NO_MARKOV, "sample_from_anchor": True}
_SPECULATORS = {"block_size": 8, "sample_from_anchor": False, "sliding_window_non_causal": False}
_LLAMA_CPP = {**_LOGITS, "causal": False}

DEFAULTS: Mapping[Dialect, Mapping[Method, Defaults]] = {
    "zlab": {
        "dflash": _ZLAB,
        "dspark": {**_ZLAB, "sample_from_anchor": True},
        "dflash2": {**_ZLAB, **_OF_SELECTOR},
        "lilicorr": {key: value for key, value in _ZLAB.items() if key not in _NO_MARKOV},
    },
    "deepspec": {"dflash": _DEEPSPEC, "dspark": _DEEPSPEC},
    "specforge": {"dflash": _DEEPSPEC, "dspark": _DEEPSPEC},
    "modelopt": {
        "dflash": {**_LOGITS, "causal": None, "block_size": 16, "sample_from_anchor": False},
        "dspark": {**_VANILLA, "causal": None, "sample_from_anchor": True, "confidence_head_with_markov": True},
        "domino": {"causal": None, "sample_from_anchor": True, "pure_draft_prefix_len": 1},
    },
    "speculators": {
        "dflash": _SPECULATORS,
        "dspark": {
            **_SPECULATORS,
            **{"sample_from_anchor": True, "markov_rank": 256, "markov_head_type": "vanilla"},
            "confidence_head_with_markov": True,
        },
        "dflash2": {**_SPECULATORS, **_OF_SELECTOR, "sliding_window_non_causal": True},
        "xpress": _SPECULATORS,
    },
    # Its DFlash proposes from slot 1, whatever the key holds.
    "llama.cpp": {
        "dflash": {**_LLAMA_CPP, "block_size": 16},
        "dspark": {**_LLAMA_CPP, "sample_from_anchor": True},
    },
}
