"""Draft layers of targets that see pictures: their entries have the target's positions and inputs."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText, DynamicCache

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.files import replace_files
from hf_speculate_plugins.heads import CachedAttention
from hf_speculate_plugins.mtp.saving import WEIGHTS, indexed

from ...support.mtp import draft_tensors
from ...support.pictures import qwen
from ...support.requests import assert_same, run
from ...support.versions import needs_transformers


pytestmark = needs_transformers("5.14", "recurrent layers take no drafts")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A target with a draft layer on the disk, loaded as users do, and a prompt with pictures."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("pictures")
    model, inputs = qwen("qwen3_5")
    model.save_pretrained(folder)
    replace_files(folder, indexed(folder, draft_tensors("qwen3_5_text"), dict.fromkeys(model.state_dict(), WEIGHTS)))
    target = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    target.generation_config.pad_token_id = 0
    return target, inputs


@pytest.mark.parametrize("do_sample", [False, True])
def test_mtp_drafts_give_plain_text_about_pictures(case, do_sample):
    target, inputs = case
    request = {**inputs, "max_new_tokens": 14, "do_sample": do_sample}
    speculator = AutoSpeculator.from_name("mtp", target, adaptive=False)
    assert_same(run(target, speculator, **request), run(target, **request))
    assert speculator.stats.drafted_tokens


@torch.no_grad()
def test_the_first_draft_is_that_of_the_targets_positions_and_inputs(case, monkeypatch):
    """One row without padding, against the layer run over what the target's own forward shows."""
    target, inputs = case
    prompt = {name: values[:1] for name, values in inputs.items()} | {"pixel_values": inputs["pixel_values"][:24]}
    drafter = AutoSpeculator.from_name("mtp", target, depth=1, top_k=1, adaptive=False).drafter
    kinds = target.model.get_rope_index(**{name: prompt[name] for name in prompt if name != "pixel_values"})[0]
    output = target(**prompt, position_ids=kinds, output_hidden_states=True, use_cache=False)
    token = output.logits[:, -1:].argmax(-1)
    head, hidden = drafter.head, output.hidden_states
    embeddings = torch.cat([hidden[0][:, 1:], target.get_input_embeddings()(token)], dim=1)
    tokens = torch.cat([prompt["input_ids"][:, 1:], token], dim=1)
    attend = CachedAttention(DynamicCache(), is_causal=True)
    expected = head.read(head(tokens, hidden[-1], kinds, attend, embeddings))[0][:, -1]
    found = []
    read = type(head).read
    monkeypatch.setattr(type(head), "read", lambda self, states: found.append(read(self, states)) or found[-1])
    target.generate(**prompt, max_new_tokens=3, do_sample=False, speculator=Speculator(drafter, adaptive=False))
    torch.testing.assert_close(found[0][0].view(expected.shape), expected, atol=1e-5, rtol=1e-5)
    of_text = torch.arange(tokens.shape[1])[None]
    for positions, given in ((of_text, embeddings), (kinds, None)):
        attend = CachedAttention(DynamicCache(), is_causal=True)
        other = read(head, head(tokens, hidden[-1], positions, attend, given))[0][:, -1]
        assert (other - expected).abs().max() > 1e-3
