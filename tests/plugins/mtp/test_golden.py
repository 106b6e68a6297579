"""Draft layers against outputs of the reference implementations, see `../shared/golden/README.md`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config, Qwen2ForCausalLM

from hf_speculate import AutoSpeculator
from hf_speculate.drafting import DraftRequest
from hf_speculate_gguf import load_model
from hf_speculate_plugins.heads import CachedAttention
from hf_speculate_plugins.mtp import MtpDrafter

from ...support.golden import CLOSE, GOLDEN, meta_of, state_for, vectors_of
from ...support.tiers import quick
from ...support.versions import skip_before


HEADS = [
    "mtp-qwen3_5-text",
    "mtp-qwen3_5-multimodal",
    "mtp-qwen3_next-moe",
    "mtp-glm4_moe",
    "mtp-deepseek_v3",
    "mtp-deepseek_v3-2layers",
    "mtp-mimo",
    "mtp-speculators",
    "mtp-qwen3_5-text/target.gguf",
]
WITH_RUNS = [name for name in HEADS if name not in ("mtp-deepseek_v3-2layers", "mtp-speculators")]
pytestmark = pytest.mark.usefixtures("golden_root")


def set_of(name: str) -> str:
    """The set of vectors of a head, which may be in a file of its own."""
    return name.partition("/")[0]


@cache
def target_of(name: str) -> Any:
    if name.endswith(".gguf"):
        skip_before("5.18", "GGUF files do not load")
        return load_model(GOLDEN / name, dtype=torch.float32)
    if name == "mtp-qwen3_5-multimodal":
        skip_before("5.17", "the text model of a checkpoint with pictures loads in the checkpoint's dtype")
    if name.startswith("mtp-deepseek_v3"):
        skip_before("5.10", "DeepSeek-V3 chooses other experts")
    folder = GOLDEN / meta_of(name)["target"]
    if name == "mtp-mimo":  # its own class is remote code; it computes what Qwen2 does
        config = Qwen2Config.from_pretrained(folder / "config.qwen2.json")
        return Qwen2ForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def drafter_of(name: str) -> MtpDrafter:
    own = {"head": str(GOLDEN / name / "head")} if name == "mtp-speculators" else {}
    return MtpDrafter.for_target(target_of(name), depth=3, top_k=1, **own)


@torch.no_grad()
def read(name: str, prefix: str = ""):
    """The vectors' N entries, run at once: states, logits, states that are fed back, and the cache."""
    head, vectors, cache = drafter_of(name).head, vectors_of(set_of(name)), DynamicCache()
    states = vectors["target_last_hidden"]
    if prefix:
        states = torch.cat([states, vectors[f"{prefix}target_last_hidden"]])
    tokens = vectors[f"{prefix}token_ids"][1:]
    positions = torch.arange(len(states))
    hidden = head(tokens[None], head.fuse([states[None]]), positions[None], CachedAttention(cache, is_causal=True))
    return hidden, *head.read(hidden), cache


@pytest.mark.parametrize("name", HEADS)
def test_golden_hidden_states_and_logits(name):
    vectors = vectors_of(set_of(name))
    hidden, logits, fed_back, _ = read(name)
    for key, found in (("tf_hidden", hidden), ("tf_logits", logits), ("tf_feedback", fed_back)):
        torch.testing.assert_close(found[0], vectors[key], **CLOSE)


@pytest.mark.parametrize("prefix", ["", "round2_"])
@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_deeper_tokens_take_the_normed_state(name, prefix):
    head, vectors = drafter_of(name).head, vectors_of(set_of(name))
    _, logits, fed_back, cache = read(name, prefix)
    count = logits.shape[1]
    for step, expected in enumerate(vectors[f"{prefix}chain_logits"]):
        torch.testing.assert_close(logits[0, -1], expected, **CLOSE)
        token = logits[:, -1:].argmax(-1)
        assert token.item() == vectors[f"{prefix}chain_target_ids"][step]
        position = torch.tensor([[count + step]])
        logits, fed_back = head.read(head(token, fed_back[:, -1:], position, CachedAttention(cache, [None])))


@pytest.mark.parametrize("name", HEADS)
def test_a_session_drafts_the_chains_and_forgets_them(name):
    vectors, drafter = vectors_of(set_of(name)), drafter_of(name)
    ids, (layer,) = vectors["token_ids"][None], drafter.feature_layers
    session = drafter.start(DraftRequest(target=target_of(name), input_ids=ids[:, :-1]))
    session.observe(ids[:, 1:], {layer: vectors["target_last_hidden"][None]}, torch.tensor([ids.shape[1] - 1]))
    tree = session.draft(state_for(ids[0, -1]))
    assert tree.host.token_ids[0][1:] == vectors["chain_target_ids"].tolist()
    later = vectors["round2_token_ids"][ids.shape[1] :]
    session.observe(later[None], {layer: vectors["round2_target_last_hidden"][None]}, torch.tensor([len(later)]))
    tree = session.draft(state_for(later[-1]))
    assert tree.host.token_ids[0][1:] == vectors["round2_chain_target_ids"].tolist()


@pytest.mark.parametrize("name", quick(WITH_RUNS, "mtp-qwen3_5-text/target.gguf", "mtp-glm4_moe"))
def test_texts_and_accepted_lengths_of_the_references_runs(name):
    target = target_of(name)
    speculator = AutoSpeculator.from_name("mtp", target, depth=3, top_k=1, adaptive=False)
    for run in meta_of(set_of(name))["e2e"]:
        prompt, speculated = torch.tensor([run["prompt"]]), speculator.stats.reset()
        text = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(run["output"]),
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
            speculator=speculator,
        )
        assert speculated is None
        assert text[0, prompt.shape[1] :].tolist() == run["output"]
        assert speculator.stats.accepted_tokens == sum(run["accept_lengths"])
