"""Heads made on the spot, and a target that they fit: EAGLE and Medusa in every published layout, random weights."""

from __future__ import annotations

import copy
import json
import os
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_speculate import AutoSpeculator
from hf_speculate_plugins.draft_model import DraftModelDrafter
from hf_speculate_plugins.eagle import EagleDrafter
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads

from .block_heads import random_block
from .models import build_tiny_model


HIDDEN, VOCAB, DEPTH = 32, 96, 7
PLAIN = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
SHAPES = {
    "dynamic": {"depth": 4, "top_k": 6, "max_nodes": 20},
    "chain": {"depth": 4, "top_k": 1},
}


def target(architecture="llama", tied=False, dtype=torch.float32, depth=DEPTH, initializer_range=0.3):
    """A random causal LM of `DEPTH` layers, which is what EAGLE-3 heads need at least. Cached: do not modify it."""
    sizes = {"num_layers": depth, "initializer_range": initializer_range}
    return build_tiny_model(architecture, tied, dtype=dtype, seed=3, **sizes)


@cache
def extended_target(num_tokens: int = VOCAB + 5, factor: float = 0.0):
    """`target()` with tokens added at its end, or taken from it. Their logits are `factor` times those of the first."""
    model = copy.deepcopy(target())
    model.resize_token_embeddings(num_tokens, mean_resizing=False)
    model.lm_head.weight[VOCAB:] = factor * model.lm_head.weight[: max(num_tokens - VOCAB, 0)]
    return model.requires_grad_(False)


def layer_tensors(prefix: str, rand, hidden, kv=16, head_dim=8, inputs=None, qk_norm=False, qkv_bias=False) -> dict:
    inputs = inputs or hidden
    sizes = {"q": (4 * head_dim, inputs), "k": (kv, inputs), "v": (kv, inputs), "o": (hidden, 4 * head_dim)}
    tensors = {f"{prefix}self_attn.{name}_proj.weight": rand(*size) for name, size in sizes.items()}
    if qkv_bias:
        tensors |= {f"{prefix}self_attn.{name}_proj.bias": rand(sizes[name][0]) for name in "qkv"}
    if qk_norm:
        tensors |= {f"{prefix}self_attn.{name}_norm.weight": 1 + rand(head_dim) for name in "qk"}
    tensors |= {f"{prefix}mlp.{name}_proj.weight": rand(48, hidden) for name in ("gate", "up")}
    tensors |= {f"{prefix}mlp.down_proj.weight": rand(hidden, 48)}
    return tensors | {f"{prefix}post_attention_layernorm.weight": 1 + rand(hidden)}


def draft_vocabulary(size: int, rand) -> dict:
    ids = torch.randperm(VOCAB)[:size].sort().values
    members = torch.zeros(VOCAB, dtype=torch.bool)
    members[ids] = True
    return {"d2t": ids - torch.arange(size), "t2d": members}


def make_tensors(layout: str, rand) -> tuple[dict, dict]:
    """config.json and tensors of a random head in a published layout."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
    }
    if layout == "eagle1":
        tensors = {"embed_tokens.weight": target().model.embed_tokens.weight.clone()}
        tensors |= layer_tensors("layers.0.", rand, HIDDEN, qkv_bias=True)
        return config, tensors | {"fc.weight": rand(HIDDEN, 2 * HIDDEN), "fc.bias": rand(HIDDEN)}
    hidden = 24 if layout == "safeailab-narrow" else HIDDEN
    prefix = "midlayer." if layout.startswith(("safeailab", "specforge")) else "layers.0."
    qk_norm = layout in ("speculators", "deepspec")
    size = VOCAB if layout == "deepspec" else 48
    num_features = {"deepspec": 5, "speculators": 4}.get(layout, 3)
    tensors = layer_tensors(prefix, rand, hidden, inputs=2 * hidden, qk_norm=qk_norm)
    tensors |= {f"{prefix}hidden_norm.weight": 1 + rand(hidden), f"{prefix}input_layernorm.weight": 1 + rand(hidden)}
    tensors |= {"fc.weight": rand(hidden, num_features * HIDDEN), "norm.weight": 1 + rand(hidden)}
    tensors |= {"lm_head.weight": rand(size, hidden)}
    if size != VOCAB:
        tensors |= draft_vocabulary(size, rand)
        if not layout.startswith("speculators"):
            config["draft_vocab_size"] = size
    config["hidden_size"] = hidden
    if layout == "safeailab-narrow":
        config |= {"target_hidden_size": HIDDEN, "rope_theta": 5e5}
        tensors["embed_tokens.weight"] = rand(VOCAB, hidden)
    elif layout == "specforge":
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "dtype": "float32",
            "norm_output": False,
            "fc_norm": True,
        }
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 3, DEPTH - 1]}
        tensors |= {f"fc_norm.{i}.weight": 1 + rand(HIDDEN) for i in range(3)}
    elif layout == "speculators":
        tensors |= layer_tensors("layers.1.", rand, hidden, qk_norm=True)
        tensors |= {"layers.1.input_layernorm.weight": 1 + rand(hidden), "input_norm.weight": 1 + rand(4 * HIDDEN)}
        tensors["embed_tokens.weight"] = rand(VOCAB, hidden)
        nested = {**config, "model_type": "qwen3", "head_dim": 8, "num_hidden_layers": 2}
        nested |= {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
        nested["use_sliding_window"] = True
        config = {"speculators_model_type": "eagle3", "speculators_version": "0.9.0", "draft_vocab_size": size}
        config |= {"transformer_layer_config": nested, "eagle_aux_hidden_state_layer_ids": [1, 2, 4, 5]}
        config |= {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
        config["embed_requires_grad"] = True
    elif layout == "speculators-parallel":
        tensors |= layer_tensors("layers.1.", rand, hidden) | {"layers.1.input_layernorm.weight": 1 + rand(hidden)}
        tensors |= {"embed_tokens.weight": rand(VOCAB, hidden), "mask_hidden": rand(1, 1, 3 * HIDDEN)}
        config = {"transformer_layer_config": {**config, "num_hidden_layers": 2}, "draft_vocab_size": size}
        config |= {"speculators_model_type": "peagle", "mask_token_id": VOCAB - 1, "norm_before_residual": False}
    elif layout == "vllm":  # as NeMo Automodel writes them: the target's config with a few keys more
        config |= {"architectures": ["LlamaEagle3DraftModel"], "target_hidden_size": HIDDEN, "parallel_drafting": False}
        config |= {"norm_output": True, "fc_norm": False, "num_hidden_layers": DEPTH, "rope_theta": 5e5}
        config |= {"sliding_window": 6, "layer_types": ["sliding_attention"] * DEPTH}
        tensors = {name if name == "lm_head.weight" else f"model.{name}": tensor for name, tensor in tensors.items()}
    elif layout == "deepspec":
        config |= {
            "model_type": "qwen3",
            "target_layer_ids": [0, 1, 3, 4, 5],
            "num_target_layers": DEPTH,
            "head_dim": 8,
        }
    return config, tensors


EAGLE_LAYOUTS = [
    "eagle1",
    "safeailab",
    "safeailab-narrow",
    "specforge",
    "speculators",
    "deepspec",
    "speculators-parallel",
    "vllm",
]


def write_head(folder, layout: str = "safeailab", change=None, file: str | None = None) -> str:
    """Writes a random head; `change(config, tensors)` may edit it before."""
    torch.manual_seed(EAGLE_LAYOUTS.index(layout))
    config, tensors = make_tensors(layout, lambda *shape: torch.randn(*shape) * 0.3)
    if change is not None:
        change(config, tensors)
    file = file or ("pytorch_model.bin" if layout in ("eagle1", "safeailab") else "model.safetensors")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, file)
    if file.endswith(".safetensors"):
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    with open(os.path.join(folder, "config.json"), "w") as config_file:
        json.dump(config, config_file)
    return str(folder)


def left_padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    width = max(len(p) for p in prompts)
    ids = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in prompts])
    masks = [torch.nn.functional.pad(torch.ones_like(p), (width - len(p), 0)) for p in prompts]
    return {"input_ids": ids, "attention_mask": torch.stack(masks)}


def batch_of(prompt, size: int) -> dict[str, torch.Tensor]:
    """One to three prompts (fixture `prompt`) of different lengths, left padded."""
    return left_padded([prompt(n, seed=n)[0] for n in (9, 4, 13)[:size]])


MEDUSA_CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))


def random_heads(
    num_heads=3, num_layers=1, *, bias=True, outputs: int | None = None, vocab_size=VOCAB, truncated=0, seed=0
):
    """Random heads; `outputs` matrices (default: one a head, 0: the target's)."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator) * 0.3

    outputs = num_heads if outputs is None else outputs
    token_ids = torch.randperm(vocab_size, generator=generator)[:truncated].sort().values if truncated else None
    return MedusaHeads(
        randn(num_heads, num_layers, HIDDEN, HIDDEN),
        randn(num_heads, num_layers, HIDDEN) if bias else None,
        randn(outputs, truncated or vocab_size, HIDDEN) if outputs else None,
        token_ids,
    )


MEDUSA_LAYOUTS = {
    "medusa1": ("fasterdecoding", random_heads()),
    "medusa1-2layers": ("fasterdecoding", random_heads(num_layers=2)),
    "v2": ("fasterdecoding", random_heads(outputs=0)),
    "vllm": ("vllm", random_heads(num_layers=2)),
    "vllm-nobias": ("vllm", random_heads(bias=False)),
    "vllm-original-lm-head": ("vllm", random_heads(outputs=1)),
    "vllm-truncated": ("vllm", random_heads(truncated=40)),
}


def write_medusa_heads(path, name="medusa1") -> Path:
    """Writes random heads of one of `MEDUSA_LAYOUTS`; returns their folder."""
    layout, heads = MEDUSA_LAYOUTS[name]
    MedusaDrafter(copy.deepcopy(heads), target()).save_pretrained(path, layout)
    return path


def _prompt_lookup(model, folder):
    return AutoSpeculator.from_name("prompt_lookup", target=model, min_ngram=1, depth=2).drafter


def _draft_model(model, folder):
    return DraftModelDrafter(target("qwen2", dtype=torch.float64))


def _eagle(layout):
    return lambda model, folder: EagleDrafter.from_folder(write_head(folder, layout), model, depth=3, top_k=2)


def _medusa(model, folder):
    size, vocab_size = model.config.hidden_size, model.config.vocab_size
    return MedusaDrafter(MedusaHeads(torch.randn(3, 1, size, size), None, torch.randn(3, vocab_size, size)), model)


# Name -> the drafter for a target; heads are written to a folder first.
DRAFTERS = {
    "prompt_lookup": _prompt_lookup,
    "draft_model": _draft_model,
    "eagle1": _eagle("eagle1"),
    "eagle3": _eagle("safeailab"),
    "peagle": _eagle("speculators-parallel"),
    "medusa": _medusa,
    "dspark": lambda model, folder: random_block("dspark", model),
    "dflash2": lambda model, folder: random_block("dflash2", model),
}
