"""Captured rounds on a device that is not there: the same text, nothing in a graph that CUDA forbids, and how much
the host does besides."""

from __future__ import annotations

import pytest
import torch

import hf_speculate
from hf_speculate import Speculator, transfers
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.policy import Budget
from hf_speculate.policy.adaptive import AdaptiveSession
from hf_speculate.testing import RandomDrafter, ScriptedDrafter

from ..support.block_heads import random_block
from ..support.device_cases import CASES, DEPTH, GREEDY, PLAIN, SAMPLED, Case, plain_text
from ..support.heads import VOCAB, target
from ..support.inputs import padded_batch
from ..support.pretended_device import TYPE, PretendedDevice
from ..support.replays import stand_in
from ..support.tiers import quick


pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(transfers, "STAGED", transfers.STAGED | {TYPE})
    with PretendedDevice() as device:
        yield device


@pytest.fixture
def replays(monkeypatch, device):
    return stand_in(monkeypatch, device)


def rounds_of(device, model, speculator, batch, request):
    """New tokens of every row, and (waits, launches, replays) of every round."""
    batch = {name: tensor.to(device.name) for name, tensor in batch.items()}
    torch.manual_seed(5)
    texts, costs = [[] for _ in batch["input_ids"]], []
    device.forget()
    for round in hf_speculate.rounds(model, **batch, **request, speculator=speculator):
        num_left = request["max_new_tokens"] - max(map(len, texts))
        costs.append((len(device.waits), device.launches, device.replays, num_left))
        for text, tokens in zip(texts, round.tokens, strict=True):
            text += tokens
        device.forget()
    return texts, costs


# Launches of a greedy round outside its replays, and replays. Sampling adds one for each new step's noise, and one for
# each use of it.
COSTS = {
    "prompt_lookup": (2, 1),
    "draft_model": (6, 2),
    "draft_model, trees": (5, 2),
    "eagle-1": (8, 2),
    "eagle-3": (8, 2),
    "eagle-3, chains": (8, 2),
    "medusa": (7, 2),
    "dspark": (8, 2),
}
DRAFTERS = CASES | {"dspark": Case(lambda model, *_: random_block("dspark", model), waits=1, uploads=8)}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", quick([(12,), (9, 4, 13)], (9, 4, 13)), ids=["1 row", "3 rows left padded"])
@pytest.mark.parametrize("name", quick(DRAFTERS, "prompt_lookup", "eagle-3", "medusa"))
def test_captured_rounds_give_plain_text_with_few_waits(device, replays, prompt, tmp_path, name, lengths, sampling):
    batch, request = padded_batch(prompt, lengths), {**PLAIN, **sampling, "max_new_tokens": 24}
    expected = plain_text(target(), batch, request)
    model = device.place(target())
    speculator = Speculator(DRAFTERS[name].make(model, tmp_path, device.place), adaptive=False)
    texts, costs = rounds_of(device, model, speculator, batch, request)
    assert texts == expected
    assert not speculator.stats.fallbacks
    assert set(speculator.stats.target_runners) == {"graph"}
    assert max(speculator.stats.draft_runners, default="") == ("" if name == "prompt_lookup" else "graph")
    # Rounds whose sizes have all been captured, and before drafts are cut at the end.
    under_way = [cost for cost in costs[len(costs) // 2 :] if cost[3] > DEPTH] or costs[-3:-2]
    assert {waits for waits, *_ in under_way} == {DRAFTERS[name].waits}
    if name in COSTS:
        launches, num_replays = COSTS[name]
        # noise of at most DEPTH + 1 steps, and two copies of it
        allowed = launches + (DEPTH + 3 if sampling is SAMPLED else 0)
        usual = sorted(found for _, found, *_ in under_way)[len(under_way) // 2]
        assert usual <= allowed
        assert {found for _, _, found, _ in under_way} == {num_replays}


def drafts(continuation, **options):
    return ScriptedDrafter(continuation, (2, 2, 1), accuracy=0.7, vocab_size=VOCAB, **options)


REQUESTS = {
    "rows that end": {"eos_token_id": "in the text"},
    "rows that end, with a cache to return": {"eos_token_id": "in the text", "return_dict_in_generate": True},
    "records": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "a repetition penalty": {"repetition_penalty": 1.3},
    "a repetition penalty, sampled": {"do_sample": True, "repetition_penalty": 1.2, "temperature": 0.7, "top_k": 20},
    "processors that read the text": {"no_repeat_ngram_size": 2, "min_new_tokens": 5},
    "a processor that looks at values": {"do_sample": True, "eta_cutoff": 1e-3},
    "top-p": {"do_sample": True, "top_p": 0.8, "temperature": 1.3},
    "min-p and typical": {"do_sample": True, "min_p": 0.05, "typical_p": 0.9},
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("lengths", quick([(12,), (9, 4, 13)], (9, 4, 13)), ids=["1 row", "3 rows left padded"])
def test_captured_rounds_give_plain_text_for_every_kind_of_request(device, replays, prompt, name, lengths):
    batch, request = padded_batch(prompt, lengths), {**PLAIN, "max_new_tokens": 20, **REQUESTS[name]}
    texts = plain_text(target(), batch, {**PLAIN, "max_new_tokens": 40})
    if request["eos_token_id"] is not None:
        request["eos_token_id"] = texts[0][6]
    torch.manual_seed(5)
    expected = target().generate(**batch, **request)
    model = device.place(target())
    torch.manual_seed(5)
    found = model.generate(
        **{key: value.to(device.name) for key, value in batch.items()},
        **request,
        speculator=Speculator(drafts(texts), adaptive=False),
    )
    if not request.get("return_dict_in_generate"):
        assert found.tolist() == expected.tolist()
        return
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert replays.num_replayed > 1
    for kind in ("scores", "logits") if "output_scores" in request else ():
        for ours, theirs in zip(found[kind], expected[kind], strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)
    ended = {**request, "eos_token_id": None}
    longer = model.generate(found.sequences, **as_cache(cache_of(found)), **{**ended, "max_new_tokens": 4})
    assert longer.sequences.shape[1] == found.sequences.shape[1] + 4


def test_host_processors_read_captured_trees_after_the_forward(device, replays, prompt, tmp_path):
    """Another replay must not have overwritten them by then."""
    batch, request = padded_batch(prompt, (9, 4, 13)), {**PLAIN, "max_new_tokens": 24, **REQUESTS["records"]}
    expected, model = target().generate(**batch, **request), device.place(target())
    speculator = Speculator(DRAFTERS["eagle-3"].make(model, tmp_path, device.place), adaptive=False)
    on_device = {name: tensor.to(device.name) for name, tensor in batch.items()}
    assert (
        model.generate(**on_device, **request, speculator=speculator).sequences.tolist() == expected.sequences.tolist()
    )
    assert "eagle_draft" in replays.names


def test_captured_rounds_move_an_accepted_path_once(device, replays, prompt):
    """A cache that replays have written goes on as plain `generate`'s does."""
    batch, request = {"input_ids": prompt(9)}, {**PLAIN, **GREEDY, "max_new_tokens": 40}
    (text,) = plain_text(target(), batch, request)
    model = device.place(target())
    first = model.generate(
        prompt(9).to(device.name),
        **{**request, "max_new_tokens": 20, "return_dict_in_generate": True},
        speculator=Speculator(drafts([text]), adaptive=False),
    )
    assert replays.num_replayed > 3
    second = model.generate(first.sequences, **as_cache(cache_of(first)), **{**request, "max_new_tokens": 20})
    assert second[0, 9:].tolist() == text


def test_foreign_hooks_prevent_capture(device, replays, prompt):
    model, calls = device.place(target()), []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB, max_nodes=6), adaptive=False)
    found = model.generate(prompt(9).to(device.name), **PLAIN, **GREEDY, speculator=speculator)
    assert found.tolist() == target().generate(prompt(9), **PLAIN, **GREEDY).tolist()
    assert len(calls) == speculator.stats.target_forwards + 1
    assert speculator.stats.fallbacks == {"not recorded: hooks on the model, which a replay would not call": 1}


def test_statistics_report_the_memory_of_cuda_graphs(device, replays, prompt):
    model, speculator = device.place(target()), Speculator(RandomDrafter(vocab_size=VOCAB, max_nodes=6), adaptive=False)
    for _ in range(2):
        model.generate(prompt(9).to(device.name), **PLAIN, **GREEDY, speculator=speculator)
    layer = model.config.num_key_value_heads * model.model.layers[0].self_attn.head_dim * 512 * 4
    first, second = speculator.stats.recorded_bytes
    assert first == second > 2 * layer * model.config.num_hidden_layers
    assert "recordings" in str(speculator.stats)


def test_training_mode_prevents_capture(device, replays, prompt):
    model, speculator = device.place(target()), Speculator(RandomDrafter(vocab_size=VOCAB, max_nodes=6), adaptive=False)
    found = model.train().generate(prompt(9).to(device.name), **PLAIN, **GREEDY, speculator=speculator)
    assert found.tolist() == target().generate(prompt(9), **PLAIN, **GREEDY).tolist()
    assert speculator.stats.fallbacks == {"not recorded: the model is in training mode": 1}


def test_interrupted_captured_request_leaves_a_usable_cache(device, replays, prompt):
    batch, request = {"input_ids": prompt(9)}, {**PLAIN, **GREEDY, "max_new_tokens": 24}
    (text,) = plain_text(target(), batch, request)
    model, emitted = device.place(target()), []
    rounds = hf_speculate.rounds(
        model, prompt(9).to(device.name), **request, speculator=Speculator(drafts([text]), adaptive=False)
    )
    for round in rounds:
        emitted += round.tokens[0]
        if len(emitted) > 10:
            break
    rounds.close()
    assert emitted == text[: len(emitted)]
    again = model.generate(prompt(9).to(device.name), **request, speculator=Speculator(drafts([text]), adaptive=False))
    assert again[0, 9:].tolist() == text


@pytest.mark.parametrize("name", quick(["eagle-3", "medusa", "dspark"], "eagle-3"))
@pytest.mark.parametrize("lengths", quick([(12,), (9, 4, 13)], (9, 4, 13)), ids=["1 row", "3 rows left padded"])
def test_captured_rounds_take_trees_that_the_policy_cuts(device, replays, prompt, tmp_path, monkeypatch, name, lengths):
    """They have fewer nodes than the forward that they are padded to."""
    monkeypatch.setattr(AdaptiveSession, "choose", lambda self, situation: Budget(None, None))
    monkeypatch.setattr(AdaptiveSession, "_best_count", lambda *_: 2)
    batch, request = padded_batch(prompt, lengths), {**PLAIN, "max_new_tokens": 24}
    expected, model = plain_text(target(), batch, request), device.place(target())
    speculator = Speculator(DRAFTERS[name].make(model, tmp_path, device.place), adaptive=True)
    texts, _ = rounds_of(device, model, speculator, batch, request)
    assert texts == expected
    assert speculator.stats.drafted_tokens == 2 * speculator.stats.rounds
