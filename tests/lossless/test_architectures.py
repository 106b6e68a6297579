"""Which causal LMs of transformers speculate, and how: tiny random models of each, text compared with plain `generate`.

`docs/architectures.md`, and the list of classes that need no trial at run time, are what
`hf_speculate.request.trial` finds; `HF_SPECULATE_WRITE_DOCS=1 pytest -k in_the_docs`
writes them anew, and a stale file fails.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.models import has_own_method
from hf_speculate.request import trial
from hf_speculate.request.trial import INPUT_PREPARATION, minor_version, run_trial
from hf_speculate.scoring.recurrent import has_recurrent_layers, target_shape
from hf_speculate.testing import RandomDrafter, ScriptedDrafter, check_lossless

from ..support.inputs import padded_batch
from ..support.models import SIZES, VOCAB_SIZE, random_model
from ..support.tiers import quick_quarter
from ..support.versions import has_transformers


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


def drafters(continuation):
    """Right in everything, in half of it, in nothing (but by chance)."""
    yield "perfect", ScriptedDrafter(continuation, (3, 2, 1, 1), vocab_size=VOCAB_SIZE)
    yield "adversarial", ScriptedDrafter(continuation, (2, 2, 1), accuracy=0.5, vocab_size=VOCAB_SIZE)
    yield "random", RandomDrafter(vocab_size=VOCAB_SIZE)


SPECULATING = [name for name, case in CASES.items() if case.drafts != NOTHING]


@pytest.mark.parametrize("name", quick_quarter(SPECULATING))
def test_text_is_that_of_plain_generate_whatever_is_drafted(name, prompt):
    model, case, ids = build(name), CASES[name], prompt(13)
    plain = model.generate(ids, max_new_tokens=17)
    for kind, drafter in drafters(plain[0, 13:]):
        speculator = Speculator(drafter)
        text = model.generate(ids, max_new_tokens=17, speculator=speculator)
        if not torch.equal(text, plain):  # then it is a proven tie, or this raises
            check_lossless(model, Speculator(drafter), [ids], max_new_tokens=17)
        said = " ".join(speculator.stats.fallbacks)
        assert (case.why in said) if case.why else not said, f"{kind}: fallbacks say {said!r}"
        if kind == "perfect":
            assert speculator.stats.mean_acceptance_length == 5, "four drafted tokens and the bonus token a round"


@pytest.mark.parametrize("name", quick_quarter(SPECULATING))
def test_rows_of_a_padded_batch_are_those_of_plain_generate(name, prompt):
    model, inputs = build(name), padded_batch(prompt, (11, 4, 9))
    plain = model.generate(**inputs, max_new_tokens=12)
    drafter = ScriptedDrafter(plain[:, 11:], (2, 2, 1), accuracy=0.6, vocab_size=VOCAB_SIZE)
    text = model.generate(**inputs, max_new_tokens=12, speculator=Speculator(drafter))
    assert torch.equal(text, plain)


@pytest.mark.parametrize("name", quick_quarter(name for name, case in CASES.items() if case.drafts == NOTHING))
def test_what_cannot_speculate_says_so_or_steps_aside(name, prompt):
    model, speculator = build(name), Speculator(RandomDrafter(vocab_size=VOCAB_SIZE))
    with pytest.raises(UnsupportedRequestError, match=CASES[name].why):
        model.generate(prompt(9), max_new_tokens=4, speculator=speculator)
    hf_speculate.attach(model, speculator)
    text = model.generate(prompt(9), max_new_tokens=8)
    hf_speculate.detach(model)
    assert torch.equal(text, model.generate(prompt(9), max_new_tokens=8))
    assert CASES[name].why in " ".join(speculator.stats.fallbacks)


@cache
def found_by_trial(name) -> str:
    """What the trial finds, for any class whatever is known of it."""
    model = build(name)
    shape, reason = target_shape(model, DynamicCache(config=model.config))
    if shape != "single":
        shape, _ = run_trial(model, shape, reason)
    return {"tree": TREES, "chain": CHAINS, "single": NOTHING}[shape]


@pytest.mark.parametrize("name", quick_quarter(CASES))
def test_the_trial_finds_what_the_other_tests_find(name):
    assert found_by_trial(name) == CASES[name].drafts


@pytest.mark.rest
def test_the_table_in_the_docs_and_the_list_of_classes_are_what_the_trial_finds(request):
    list_path = Path(trial.__file__).with_name("tried_classes.json")
    listed = json.loads(list_path.read_text())
    is_writing = bool(os.environ.get("HF_SPECULATE_WRITE_DOCS"))
    if not is_writing and minor_version() not in listed:
        pytest.skip("they are about other minor versions of transformers; every model is tried with this one")
    made = {
        list_path: json.dumps(dict(sorted((listed | {minor_version(): tried_classes()}).items())), indent=1) + "\n",
    }
    if Version(minor_version()) >= max(map(Version, listed)):
        made[request.config.rootpath / "docs" / "architectures.md"] = document()
    for path, text in made.items():
        if is_writing:
            path.write_text(text)
        assert path.read_text() == text, "stale: run this test with HF_SPECULATE_WRITE_DOCS=1"


def tried_classes() -> list[str]:
    """Those that the trial finds no narrower than their config says."""
    names = set()
    for name in CASES:
        model = build(name)
        cache = DynamicCache(config=model.config)
        is_widest = {"tree": TREES, "chain": CHAINS}.get(target_shape(model, cache)[0]) == found_by_trial(name)
        has_own = any(has_own_method(model, method) for method in INPUT_PREPARATION)
        if is_widest and not has_own and not has_recurrent_layers(cache):  # others are tried whatever this list says
            names.add(type(model).__name__)
    return sorted(names)


HEAD = """# Architectures

Causal LMs of transformers that were tried at tiny random size in fp32 (`tests/lossless/test_architectures.py`, which
also writes this page): with a drafter that is always right, one that is right half of the time and one that guesses,
alone and in a left-padded batch, the text is that of plain `generate`. Others work the same way where their forward
takes position ids, a 4-D mask (or one for each layer type) and a `Cache` of attention layers.

- **trees**: every draft tree is scored in one forward. Sliding windows and chunks keep about 1.5 windows of entries.
- **chains**: one branch a round; why is in `stats.fallbacks`. For recurrent layers one copy of their states is held,
  however long the text; accepted tokens of a chain that was rejected in part are run again with the next one (16 at
  most), and the rows of a batch advance together.
- **no drafts**: an explicit `speculator=` raises the error given; an attached one steps aside with a warning.

The column *drafts* is what a trial finds. It also runs before the first request of a model whose class is not in this
table, whose class prepares its inputs its own way, or that has recurrent layers: stock's loop and ours write a tiny
left-padded batch, with drafts that are accepted, in part accepted and rejected, and the logits of every step are
compared.

For `zamba2` and `nemotron_h` the result depends on the weights. transformers raises time steps below `time_step_min`,
but only in forwards over several tokens. A model with such steps takes no drafts.

| `model_type` | drafts | remarks |
|---|---|---|
"""


def document() -> str:
    rows = []
    for name, case in CASES.items():
        remarks = "; ".join(part for part in (case.note, case.why) if part)
        rows.append(f"| `{name}` | {found_by_trial(name)} | {remarks} |\n")
    return HEAD + "".join(rows)
