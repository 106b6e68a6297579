"""Medusa heads never change the text, and draft from the right features, noise and ranks."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from accelerate import dispatch_model

from hf_speculate import AutoSpeculator, Speculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.drafting import DraftChecks, DraftRequest, DraftState
from hf_speculate.testing import check_drafter, check_lossless
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads, StaticTree
from hf_speculate_plugins.medusa.drafter import MedusaSession

from ...support.heads import (
    HIDDEN,
    MEDUSA_CHOICES,
    MEDUSA_LAYOUTS,
    VOCAB,
    batch_of,
    random_heads,
    write_medusa_heads,
)
from ...support.tiers import quick, quick_quarter


@pytest.mark.parametrize("name", quick_quarter(MEDUSA_LAYOUTS))
@pytest.mark.parametrize(
    ("architecture", "tied", "do_sample"), [("llama", False, False), ("qwen2", True, True)], ids=["greedy", "sampling"]
)
def test_text_is_the_targets_in_every_layout(tmp_path, tiny_model, prompt, name, architecture, tied, do_sample):
    target = tiny_model(architecture, tied)
    speculator = AutoSpeculator.from_pretrained(write_medusa_heads(tmp_path, name), target=target)
    for inputs in ({"input_ids": prompt(8)}, batch_of(prompt, 3)):
        kwargs = {**inputs, "do_sample": do_sample, "max_new_tokens": 24}
        kwargs |= {"temperature": 1.3, "top_k": 20} if do_sample else {}
        torch.manual_seed(7)
        expected = target.generate(**kwargs)
        torch.manual_seed(7)
        assert torch.equal(target.generate(**kwargs, speculator=speculator), expected)
    assert speculator.stats.rounds > 0


@pytest.mark.parametrize("name", quick_quarter(MEDUSA_LAYOUTS))
def test_bfloat16_differences_are_ties(tmp_path, tiny_model, prompt, name):
    folder = write_medusa_heads(tmp_path, name)
    for architecture, tied, request in (("llama", False, {}), ("qwen2", True, {"do_sample": True, "seeds": (1,)})):
        target = tiny_model(architecture, tied, dtype=torch.bfloat16)
        speculator = AutoSpeculator.from_pretrained(folder, target=target)
        report = check_lossless(
            target, speculator, [prompt(8)[0]], max_new_tokens=24, **request
        )  # raises unless proven
        assert (report.num_cases, report.num_tokens) == (1, 24)
        assert speculator.stats.rounds > 0


@pytest.mark.parametrize("name", ["medusa1", "v2", "vllm-original-lm-head"])
def test_device_map_with_offloading(tmp_path, tiny_model, prompt, name):
    """The output matrix of the target is nowhere until it is called; the heads sit where it computes."""
    model = copy.deepcopy(tiny_model())
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    offload_dir = str(tmp_path / "offloaded")
    model = dispatch_model(model, device_map, main_device="cpu", offload_dir=offload_dir, force_hooks=True)
    assert model.lm_head.weight.device.type == "meta"
    speculator = AutoSpeculator.from_pretrained(write_medusa_heads(tmp_path / "head", name), target=model)
    assert speculator.drafter.heads.device.type == "cpu"
    output = model.generate(prompt(8), max_new_tokens=24, do_sample=False, speculator=speculator)
    assert torch.equal(output, tiny_model().generate(prompt(8), max_new_tokens=24, do_sample=False))
    assert speculator.stats.rounds > 0


@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen2", False)])
def test_text_is_the_targets_with_eos_penalty_and_a_second_turn(tiny_model, prompt, architecture, tied):
    target = tiny_model(architecture, tied)
    speculator = Speculator(MedusaDrafter(random_heads(4), target, tree=StaticTree.of(MEDUSA_CHOICES)))
    kwargs = {"max_new_tokens": 16, "repetition_penalty": 1.2, "eos_token_id": [5, 9, 17]}
    for inputs in ({"input_ids": prompt(8)}, batch_of(prompt, 3)):
        expected = target.generate(**inputs, **kwargs)
        assert torch.equal(target.generate(**inputs, **kwargs, speculator=speculator), expected)
    first = target.generate(prompt(8), max_new_tokens=12, return_dict_in_generate=True, speculator=speculator)
    turn = torch.cat([first.sequences, prompt(5, seed=3)], dim=1)
    again = target.generate(turn, **as_cache(cache_of(first)), max_new_tokens=12, speculator=speculator)
    assert torch.equal(again, target.generate(turn, max_new_tokens=12))


@pytest.mark.parametrize("name", quick(["v2", "medusa1-2layers", "vllm-truncated"]))
def test_medusa_keeps_the_contract_of_drafters(tiny_model, prompt, name):
    target = tiny_model()
    drafter = MedusaDrafter(copy.deepcopy(MEDUSA_LAYOUTS[name][1]), target, tree=StaticTree.of(MEDUSA_CHOICES))
    check_drafter(drafter, target, [prompt(7)[0], prompt(4, seed=2)[0]])


def test_heads_take_the_targets_dtype_and_do_not_keep_it_alive(tmp_path, tiny_model, prompt):
    target = copy.deepcopy(tiny_model(dtype=torch.bfloat16))
    speculator = AutoSpeculator.from_pretrained(write_medusa_heads(tmp_path, "v2"), target=target)
    assert speculator.drafter.heads.dtype == torch.bfloat16
    assert target.generate(prompt(8), max_new_tokens=12, speculator=speculator).shape == (1, 20)
    alive = weakref.ref(target)
    del target
    gc.collect()
    assert alive() is None


def permutation_target(tiny_model, num_heads: int):
    """A target that maps token v to perm[v], and heads that know it: head h on the state of v scores perm^(h+2)[v].

    The layers add nothing, and the rows of the embedding are distinct enough for the right logit to be the largest.
    """
    target = copy.deepcopy(tiny_model())
    generator = torch.Generator().manual_seed(1)
    perm = torch.randperm(VOCAB, generator=generator)
    state = torch.randn(VOCAB, HIDDEN, generator=generator)
    state = state / state.norm(dim=-1, keepdim=True)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    target.model.embed_tokens.weight.data = state
    powers = [perm]
    for _ in range(num_heads):
        powers.append(perm[powers[-1]])
    matrices = []
    for power in powers:
        matrix = torch.zeros(VOCAB, HIDDEN)
        matrix[power] = state
        matrices.append(matrix)
    target.lm_head.weight.data = matrices[0]
    zeros = torch.zeros(num_heads, 1, HIDDEN, HIDDEN)
    return target.requires_grad_(False), MedusaHeads(
        zeros, torch.zeros(num_heads, 1, HIDDEN), torch.stack(matrices[1:])
    )


@pytest.mark.parametrize("batch", [False, True], ids=["B=1", "left-padded"])
@pytest.mark.parametrize("truncated", [False, True])
def test_heads_that_know_a_permutation_target_are_accepted_at_every_depth(tiny_model, prompt, batch, truncated):
    target, heads = permutation_target(tiny_model, num_heads=4)
    if truncated:  # a shuffled map of all tokens: ids go through it in both directions
        token_ids = torch.randperm(VOCAB)
        heads = MedusaHeads(
            heads.block_weight.data, heads.block_bias.data, heads.output_weight[:, token_ids], token_ids
        )
    speculator = Speculator(MedusaDrafter(heads, target, tree=StaticTree.of(MEDUSA_CHOICES)))
    inputs = batch_of(prompt, 3) if batch else {"input_ids": prompt(8)}
    output = target.generate(**inputs, max_new_tokens=41, speculator=speculator)
    assert torch.equal(output, target.generate(**inputs, max_new_tokens=41))
    assert set(speculator.stats.accepted_histogram) == {4}
    assert speculator.stats.acceptance_rate_by_depth == dict.fromkeys(range(1, 5), 1.0)


@pytest.mark.parametrize("batch", [False, True], ids=["B=1", "left-padded"])
@pytest.mark.parametrize("truncated", [False, True])
def test_a_request_that_samples_is_drafted_with_its_own_noise(tiny_model, prompt, batch, truncated):
    """A target with one distribution for every token, and heads that have it too: the noise of step and row decides."""
    target = copy.deepcopy(tiny_model())
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    target.model.embed_tokens.weight[:] = target.model.embed_tokens.weight[5].clone()
    token_ids = torch.randperm(VOCAB) if truncated else None
    output = target.lm_head.weight[slice(None) if token_ids is None else token_ids]
    heads = MedusaHeads(torch.zeros(4, 1, HIDDEN, HIDDEN), None, output.expand(4, -1, -1).clone(), token_ids)
    speculator = Speculator(MedusaDrafter(heads, target, tree=StaticTree.of([(0,) * d for d in range(1, 5)])))
    inputs = batch_of(prompt, 3) if batch else {"input_ids": prompt(8)}
    kwargs = {**inputs, "do_sample": True, "temperature": 1.5, "top_k": 30, "max_new_tokens": 41}
    torch.manual_seed(3)
    expected = target.generate(**kwargs)
    torch.manual_seed(3)
    assert torch.equal(target.generate(**kwargs, speculator=speculator), expected)
    assert len(expected[0, -41:].unique()) > 10
    assert set(speculator.stats.accepted_histogram) == {4}


def test_only_the_right_rank_is_accepted(tiny_model, prompt):
    target, heads = permutation_target(tiny_model, num_heads=3)
    speculator = Speculator(MedusaDrafter(heads, target, tree=StaticTree.of([(1,), (2,), (1, 0)])))
    target.generate(prompt(8), max_new_tokens=12, speculator=speculator)
    assert set(speculator.stats.accepted_histogram) == {0}


def test_a_target_that_takes_no_trees_gets_the_chain_of_best_tokens(tiny_model):
    """Whatever the choices are: here not even the root's best child is one."""
    target, heads = permutation_target(tiny_model, num_heads=3)
    session = MedusaDrafter(heads, target, tree=StaticTree.of([(1,)])).start(
        DraftRequest(target=target, input_ids=torch.tensor([[4]]))
    )
    states = target(torch.tensor([[4]]), output_hidden_states=True).hidden_states
    text = target.generate(torch.tensor([[4]]), max_new_tokens=4)[0, 1:]
    session.observe(text[None, :1], {2: states[2]}, torch.tensor([1]))
    state = DraftState(root_ids=text[:1], active=(True,), max_depth=9, chains_only=True, num_emitted=(1,))
    tree = session.draft(state)
    assert tree.token_ids.tolist() == [text.tolist()]
    assert tree.host.parents == [[-1, 0, 1, 2]]


@pytest.mark.parametrize("batch", [False, True], ids=["B=1", "left-padded"])
def test_the_feature_of_every_round_is_that_of_a_plain_forward(tiny_model, prompt, batch, monkeypatch):
    """fp64: after rejections, in padded rows, at every round: the state is the one the root was chosen from."""
    target = tiny_model(dtype=torch.float64)
    speculator = Speculator(MedusaDrafter(random_heads(4).double(), target, tree=StaticTree.of(MEDUSA_CHOICES)))
    used = []
    original = MedusaSession.draft

    def draft(self, state):
        used.append((self._seen.newest(), state))
        return original(self, state)

    monkeypatch.setattr(MedusaSession, "draft", draft)
    inputs = batch_of(prompt, 3) if batch else {"input_ids": prompt(8)}
    sequences = target.generate(**inputs, max_new_tokens=20, speculator=speculator)
    width = inputs["input_ids"].shape[1]
    mask = torch.nn.functional.pad(inputs.get("attention_mask", torch.ones(1, width).long()), (0, 20), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    states = target(sequences, attention_mask=mask[:, : sequences.shape[1]], position_ids=positions,
                    output_hidden_states=True).hidden_states[-1]  # fmt: skip
    assert len(used) > 5
    for features, state in used:
        for row, is_active in enumerate(state.active):
            if is_active:
                root = width + state.num_emitted[row] - 1
                assert sequences[row, root] == state.root_ids[row]
                torch.testing.assert_close(features[row], states[row, root - 1], atol=1e-9, rtol=1e-9)


def test_drafted_tokens_are_the_ranked_tokens_of_the_heads(tiny_model, prompt, monkeypatch):
    target = tiny_model()
    heads = random_heads(4)
    speculator = Speculator(MedusaDrafter(heads, target, tree=StaticTree.of(MEDUSA_CHOICES)))
    drafted = []
    original = MedusaSession.draft

    def draft(self, state):
        tree = original(self, state)
        DraftChecks("test", VOCAB).admit(tree, state.root_ids.tolist())
        drafted.append((self._seen.newest(), state, tree))
        return tree

    monkeypatch.setattr(MedusaSession, "draft", draft)
    target.generate(prompt(8), max_new_tokens=20, speculator=speculator)
    for features, state, tree in drafted:
        kept = [choice for choice in MEDUSA_CHOICES if len(choice) <= state.max_depth]
        for node, choice in enumerate(kept, start=1):
            depth = len(choice)
            state_h = features[0]
            state_h = state_h + torch.nn.functional.silu(
                heads.block_weight[depth - 1, 0] @ state_h + heads.block_bias[depth - 1, 0]
            )
            ranked = (heads.output_weight[depth - 1] @ state_h).argsort(descending=True)
            assert tree.host.token_ids[0][node] == ranked[choice[-1]]


def test_forward_of_a_part_of_the_heads_and_of_leading_dimensions(tiny_model):
    heads, features = random_heads(3, 2), torch.randn(2, 5, HIDDEN)
    logits = heads(features)
    assert logits.shape == (3, 2, 5, VOCAB)
    torch.testing.assert_close(heads(features, num_heads=2), logits[:2])
    torch.testing.assert_close(heads(features[1, 3]), logits[:, 1, 3])
    lm_head = tiny_model().lm_head
    assert random_heads(outputs=0)(features, lm_head).shape == (3, 2, 5, VOCAB)
    with pytest.raises(TypeError, match="lm_head"):
        random_heads(outputs=0)(features)
