"""The classes of causal LMs that the project knows by test: tiny configurations of each, and what they take."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from .models import SIZES, random_model
from .versions import has_transformers


TREES, CHAINS, NOTHING = "trees", "chains", "no drafts"

COMMON = SIZES | {"num_hidden_layers": 4, "head_dim": 8}
# Shorter than the text, so that windows move and chunks change while it is written.
WINDOW = {"sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}
LATENT = EXPERTS | {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
ZAMBA = {
    "mamba_d_state": 8,
    "mamba_ngroups": 1,
    "n_mamba_heads": 8,
    "mamba_headdim": 8,
    "chunk_size": 8,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "num_mem_blocks": 1,
    "adapter_rank": 4,
    "attention_head_dim": 16,
}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
    "hybrid_override_pattern": "M*M-",
}
SSM = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}


HEADS = "\n## Heads and draft layers\n"
"""Heading of the second part of `docs/architectures.md`, which the tests of training write."""


@dataclass(frozen=True)
class Case:
    """One architecture.

    Attributes:
        options: what its config needs beside `COMMON` (None: that argument is left out).
        drafts: what it takes.
        why: the reason where that is not trees: part of what `stats.fallbacks`, or the error, says.
        note: for the table.
    """

    options: dict[str, Any] = field(default_factory=dict)
    drafts: str = TREES
    why: str = ""
    note: str = ""


RECURRENT = "recurrent layers: chains only, rejected tokens are undone by a copy of the states"
# Found by trying: transformers' own forward over several tokens behind a cache differs from one token after another.
FORGETS = "does not score several tokens at once as one after another"
NO_CACHE = "speculator= needs a transformers Cache"
NO_ATTENTION = f"{NO_CACHE} with attention layers" if has_transformers("5.23") else NO_CACHE
# A forward over one token does not raise time steps to `time_step_min`: short ones give other states there.
LONG_STEPS = {"time_step_min": 1e-6, "time_step_floor": 0.05}
ALL_LONG = "no time step below `time_step_min`"
SOME_SHORT = "some time steps below `time_step_min`"
SLIDING = "sliding windows"
MIXED = "sliding windows and full attention"
CASES = {
    "llama": Case(),
    "mistral": Case(WINDOW, note=SLIDING),
    "ministral": Case(WINDOW, note=SLIDING),
    "mixtral": Case(WINDOW | {"num_local_experts": 4}, note=f"experts, {SLIDING}"),
    "qwen2": Case(WINDOW | {"use_sliding_window": True, "max_window_layers": 2}, note=MIXED),
    "qwen2_moe": Case(EXPERTS, note="experts"),
    "qwen3": Case(WINDOW | {"use_sliding_window": True, "max_window_layers": 2}, note=MIXED),
    "qwen3_moe": Case(EXPERTS, note="experts"),
    "phi": Case(),
    "phi3": Case(WINDOW, note=SLIDING),
    "phimoe": Case(WINDOW | {"num_local_experts": 4}, note=f"experts, {SLIDING}"),
    "gemma": Case(),
    "gemma2": Case(WINDOW | {"query_pre_attn_scalar": 8}, note=f"{MIXED}, soft-capped"),
    "gemma3_text": Case(
        WINDOW | {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}, note=MIXED
    ),
    "gpt_oss": Case(
        WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}, note=f"experts, attention sinks, {MIXED}"
    ),
    "llama4_text": Case(
        {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "num_experts_per_tok": 1},
        note="experts, chunked and full attention",
    ),
    "cohere": Case(),
    "cohere2": Case(WINDOW, note=MIXED),
    "olmo": Case(),
    "olmo2": Case(),
    "olmo3": Case(WINDOW, note=MIXED),
    "olmoe": Case(EXPERTS, note="experts"),
    "granite": Case(),
    "granitemoe": Case({"num_local_experts": 4}, note="experts"),
    "smollm3": Case(),
    "starcoder2": Case(WINDOW, note=SLIDING),
    "stablelm": Case(),
    "exaone4": Case(WINDOW, note=MIXED),
    "glm": Case(),
    "glm4": Case(),
    "helium": Case(),
    "nemotron": Case(),
    "persimmon": Case(),
    "apertus": Case(),
    "arcee": Case(),
    "seed_oss": Case(),
    "ernie4_5": Case(),
    "hunyuan_v1_dense": Case(),
    "deepseek_v2": Case(LATENT, note="latent attention, experts"),
    "deepseek_v3": Case(LATENT, note="latent attention, experts"),
    "gpt2": Case(GPT, note="learned positions"),
    "gpt_bigcode": Case(GPT, note="learned positions"),
    "gpt_neox": Case(),
    "gptj": Case(GPT | {"rotary_dim": 4}),
    "codegen": Case(GPT | {"rotary_dim": 4}),
    "opt": Case({"ffn_dim": 48, "word_embed_proj_dim": 32}, note="learned positions"),
    "biogpt": Case(note="learned positions"),
    "xglm": Case({"d_model": 32, "ffn_dim": 48, "num_layers": 4, "attention_heads": 4}, note="sinusoidal positions"),
    "falcon": Case({"head_dim": None}),
    "falcon (ALiBi)": Case(
        {"head_dim": None, "alibi": True, "multi_query": False}, CHAINS, "ALiBi counts along the cache: chains only"
    ),
    "bloom": Case({"n_layer": 4, "n_head": 4}, CHAINS, "takes no position ids: chains only", note="ALiBi"),
    "mpt": Case(
        {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 256, "use_cache": True},
        CHAINS,
        "takes no position ids: chains only",
        note="ALiBi",
    ),
    "gpt_neo": Case(
        {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
        CHAINS,
        "local attention counts along the cache: chains only",
        note="learned positions",
    ),
    "qwen3_next": Case(
        DELTA | EXPERTS | {"shared_expert_intermediate_size": 16}, CHAINS, RECURRENT, "experts, gated delta net"
    ),
    "qwen3_5_text": Case(DELTA, CHAINS, RECURRENT, "gated delta net"),
    "jamba": Case(
        {
            "mamba_d_state": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
        },
        NOTHING,
        FORGETS,
        "experts, Mamba",
    ),
    "bamba": Case(SSM | {"attn_layer_indices": [1, 3]}, CHAINS, RECURRENT, "Mamba 2"),
    "falcon_h1": Case(SSM | {"mamba_d_ssm": 64}, CHAINS, RECURRENT, "Mamba 2 and attention in every layer"),
    "granitemoehybrid": Case(
        SSM
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
            "layer_types": ["mamba", "attention"] * 2,
        },
        CHAINS,
        RECURRENT,
        "experts, Mamba 2",
    ),
    "zamba2": Case(ZAMBA | LONG_STEPS, CHAINS, RECURRENT, f"Mamba 2, shared attention, {ALL_LONG}"),
    "zamba2 (short steps)": Case(ZAMBA, NOTHING, FORGETS, f"Mamba 2, shared attention, {SOME_SHORT}"),
    "nemotron_h": Case(NEMOTRON | LONG_STEPS, CHAINS, RECURRENT, f"Mamba 2, {ALL_LONG}"),
    "nemotron_h (short steps)": Case(NEMOTRON, NOTHING, FORGETS, f"Mamba 2, {SOME_SHORT}"),
    "recurrent_gemma": Case(
        {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 6}, NOTHING, FORGETS, "RG-LRU, " + SLIDING
    ),
    "lfm2": Case({"layer_types": ["conv", "full_attention"] * 2}, CHAINS, RECURRENT, "short convolutions"),
    "mamba": Case({"state_size": 8}, NOTHING, NO_ATTENTION),
    "mamba2": Case(
        {"state_size": 8, "num_heads": 8, "n_groups": 1, "expand": 2, "chunk_size": 8}, NOTHING, NO_ATTENTION
    ),
    "falcon_mamba": Case({"state_size": 8}, NOTHING, NO_ATTENTION),
    "minimax": Case({"num_local_experts": 2, "block_size": 8}, NOTHING, NO_CACHE, "lightning attention"),
    "rwkv": Case({"attention_hidden_size": 32}, NOTHING, NO_CACHE),
}


# Cases by which older versions of transformers differ.
if not has_transformers("5.14"):
    AS_OLD = "drafting for recurrent layers needs transformers >= 5.14"
    FORGETFUL = ("jamba", "zamba2 (short steps)", "nemotron_h (short steps)")
    recurrent = [name for name, case in CASES.items() if case.why == RECURRENT or name in FORGETFUL]
    CASES |= {name: replace(CASES[name], drafts=NOTHING, why=AS_OLD) for name in recurrent}
if not has_transformers("5.10"):  # its config knows no layers without experts
    CASES = {name: case for name, case in CASES.items() if not name.startswith("nemotron_h")}


@cache
def build(name: str):
    case = CASES[name]
    model_type = name.split(" ")[0]
    options = {key: value for key, value in (COMMON | case.options).items() if (key, value) != ("head_dim", None)}
    config = AutoConfig.for_model(model_type, **options)
    return random_model(AutoModelForCausalLM.from_config, config)
