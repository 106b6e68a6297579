"""Tiny targets on the disk whose checkpoints hold draft layers (MTP), in the layouts of all families."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_speculate.files import replace_files
from hf_speculate_plugins.mtp import LAYOUTS
from hf_speculate_plugins.mtp.saving import WEIGHTS, indexed

from .models import SIZES, random_model
from .versions import skip_before


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_ROUTED = _EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
# Model type -> options of its config, layout of its draft layers.
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_5_text": (_DELTA, "Qwen"),
    "qwen3_next": (_DELTA | _EXPERTS | {"shared_expert_intermediate_size": 16}, "Qwen"),
    "glm4_moe": (_ROUTED | {"first_k_dense_replace": 1, "use_qk_norm": True}, "DeepSeek and GLM"),
    "deepseek_v3": (_ROUTED | _LATENT | {"first_k_dense_replace": 1, "num_key_value_heads": 4}, "DeepSeek and GLM"),
    "qwen2": ({}, "MiMo"),
    "llama": ({}, "speculators"),
}
DEPTH = 4
_PREFIXES = {
    "Qwen": ("mtp.", "mtp.layers.0."),
    "DeepSeek and GLM": (f"model.layers.{DEPTH}.",) * 2,
    "MiMo": ("model.mtp_layers.0.",) * 2,
    "speculators": ("mtp_layers.0.",) * 2,
}


def skip_where_not_drafted(family: str) -> None:
    """Skips the test of a family whose layers a version of transformers takes no drafts for."""
    if "linear_num_value_heads" in FAMILIES[family][0]:
        skip_before("5.14", "recurrent layers take no drafts")


@cache
def build(family: str):
    """A random target of a family. Cached: do not modify it."""
    options, _ = FAMILIES[family]
    sizes = SIZES | {"num_hidden_layers": DEPTH, "head_dim": 8} | options
    return random_model(AutoModelForCausalLM.from_config, AutoConfig.for_model(family, **sizes))


def draft_tensors(family: str, seed: int = 7, layer: int = 0) -> dict[str, torch.Tensor]:
    """Random draft layers under the names of the family's files. Experts have a tensor each."""
    model, (_, name) = build(family), FAMILIES[family]
    layout = next(each for each in LAYOUTS if each.name == name)
    draws = torch.Generator().manual_seed(seed)
    hidden = model.config.hidden_size
    of_module = {module: name for name, module in layout.names.items()}
    outer, inner = _PREFIXES[name]
    outer, inner = (prefix.replace(f"layers.{DEPTH}.", f"layers.{DEPTH + layer}.") for prefix in (outer, inner))
    tensors = {f"{outer}{of_module[norm]}.weight": torch.ones(hidden) for norm in ("enorm", "hnorm", "norm")}
    tensors[f"{outer}{of_module['fc']}.weight"] = torch.randn(hidden, 2 * hidden, generator=draws) * 0.2
    attending = [each for each in model.model.layers if hasattr(each, "self_attn")]
    for key, like in attending[-1].state_dict().items():
        values = torch.randn(like.shape, generator=draws) * 0.2 + ("norm" in key)
        tensors |= _for_experts(f"{inner}{key}", values)
    return {key: tensor.contiguous() for key, tensor in tensors.items()}


def _for_experts(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    prefix, _, kind = name.rpartition(".")
    if kind == "gate_up_proj":
        halves = [("gate", values.chunk(2, dim=1)[0]), ("up", values.chunk(2, dim=1)[1])]
    elif kind == "down_proj":
        halves = [("down", values)]
    else:
        return {name: values}
    return {f"{prefix}.{n}.{part}_proj.weight": half[n].clone() for part, half in halves for n in range(len(values))}


def write_target(folder: Path, family: str, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Saves the target of a family with draft layers; returns the folder."""
    model = build(family)
    model.save_pretrained(folder)
    files = dict.fromkeys(model.state_dict(), WEIGHTS)
    replace_files(folder, indexed(folder, draft_tensors(family) if tensors is None else tensors, files))
    return folder


def load_target(folder: Path):
    """The target in a folder, as users load it: transformers drops the draft layers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
