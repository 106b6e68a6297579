"""Compiled forwards with static shapes: the same text as without, and a bounded number of graphs.

The backend "eager" traces with dynamo (guards, fullgraph, recompilations are real) and runs the graph as it is, which
takes seconds; inductor's code is compared in the nightly tier.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import hf_speculate
from hf_speculate import Speculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.drafting import RAW_LAST
from hf_speculate.graphs import CudaGraphs
from hf_speculate.graphs import graph_runner as graphs
from hf_speculate.graphs.graph_runner import graphs_of
from hf_speculate.testing import RandomDrafter, ScriptedDrafter

from ..support.models import VOCAB_SIZE
from ..support.tiers import quick


class FeatureDrafter(RandomDrafter):
    """Random trees, and a tap."""

    layers = (1,)

    @property
    def feature_layers(self):
        return self.layers


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def model_of(tiny_model, architecture="llama", **options):
    """A model of this test's own: graphs stay with the model."""
    model = tiny_model(architecture, max_positions=2048, **options)
    graphs_of(model, "eager").by_key.clear()
    return model


def new_tokens(model, prompt, speculator=None, **request):
    request = {"max_new_tokens": 24, "do_sample": False, **request}
    return model.generate(prompt, speculator=speculator, **request)[:, prompt.shape[1] :].tolist()


def num_graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("architecture", quick(["llama", "qwen2"]))
@pytest.mark.parametrize("sampled", quick([False, True]))
def test_compiled_forwards_give_plain_text(tiny_model, prompt, architecture, sampled):
    model = model_of(tiny_model, architecture)
    drafter = FeatureDrafter(vocab_size=VOCAB_SIZE, max_nodes=6)
    speculator = Speculator(drafter, compile="eager")
    torch.manual_seed(3)
    expected = new_tokens(model, prompt(12), do_sample=sampled)
    torch.manual_seed(3)
    assert new_tokens(model, prompt(12), speculator, do_sample=sampled) == expected
    assert not speculator.stats.fallbacks, "nothing was to run uncompiled"
    assert set(speculator.stats.target_runners) == {"graph"}
    assert 1 <= num_graphs() <= 2, "trees of up to 7 nodes need the buckets 1 and 8"


def test_compiled_forwards_keep_accepted_drafts_in_static_buffers(tiny_model, prompt):
    model = model_of(tiny_model)
    continuation = new_tokens(model, prompt(12), max_new_tokens=32)
    drafter = ScriptedDrafter(continuation, (2, 2, 1), accuracy=0.8, vocab_size=VOCAB_SIZE)
    speculator = Speculator(drafter, compile="eager")
    assert new_tokens(model, prompt(12), speculator) == [row[:24] for row in continuation]
    assert speculator.stats.accepted_tokens > 8, "the test is about accepted drafts"
    assert not speculator.stats.fallbacks


def test_compiled_forwards_give_plain_text_for_padded_batches(tiny_model):
    model = model_of(tiny_model)
    batch = torch.tensor([[0, 0, 0, 5, 6], [7, 8, 9, 10, 11], [0, 12, 13, 14, 15]])
    mask = (batch > 0).long()
    continuation = new_tokens(model, batch, attention_mask=mask, max_new_tokens=32)
    drafter = ScriptedDrafter(continuation, (2, 1, 1), accuracy=0.7, vocab_size=VOCAB_SIZE)
    speculator = Speculator(drafter, compile="eager")
    assert new_tokens(model, batch, speculator, attention_mask=mask) == [row[:24] for row in continuation]
    assert not speculator.stats.fallbacks
    assert num_graphs() <= 2


@pytest.mark.rest
def test_compiled_forwards_reuse_graphs_for_other_prompts_and_grad_modes(tiny_model, prompt):
    model = model_of(tiny_model)
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), compile="eager")
    new_tokens(model, prompt(10), speculator)
    first = num_graphs()
    assert new_tokens(model, prompt(40), speculator) == new_tokens(model, prompt(40))
    with torch.inference_mode():
        found = new_tokens(model, prompt(17), speculator)
    assert found == new_tokens(model, prompt(17))
    assert num_graphs() == first, "a longer prompt or inference mode compiled again"
    assert not speculator.stats.fallbacks


@pytest.mark.rest
def test_larger_cache_capacity_costs_one_more_graph(tiny_model, prompt):
    model = model_of(tiny_model)
    text = prompt(500)
    drafter = ScriptedDrafter(new_tokens(model, text, max_new_tokens=40), (1,), vocab_size=VOCAB_SIZE, accuracy=0.5)
    speculator = Speculator(drafter, compile="eager")
    assert new_tokens(model, text, speculator) == new_tokens(model, text)
    assert num_graphs() <= 3, "8 nodes at 512 and at 1024 entries, and perhaps a root alone"
    assert {key[2] for _, key in graphs_of(model, "eager").by_key} == {512, 1024}  # pyright: ignore[reportIndexIssue]


def test_cache_of_a_compiled_call_continues_in_plain_generate(tiny_model, prompt):
    model = model_of(tiny_model)
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), compile="eager")
    request = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(prompt(10), speculator=speculator, **request)
    expected = model.generate(prompt(10), **{**request, "max_new_tokens": 16}).sequences
    second = model.generate(first.sequences, **as_cache(cache_of(first)), **request)
    assert second.sequences.tolist() == expected.tolist()


def test_compiled_forwards_keep_the_limit_of_graphs(tiny_model, prompt, monkeypatch):
    model = model_of(tiny_model)
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=12), compile="eager")
    assert new_tokens(model, prompt(10), speculator) == new_tokens(model, prompt(10))
    assert num_graphs() == 1
    (reason,) = speculator.stats.fallbacks
    assert "graphs" in reason


def test_failed_compilation_falls_back_to_eager(tiny_model, prompt, monkeypatch):
    model = model_of(tiny_model)

    def broken(*_args):
        raise RuntimeError("no compiler")

    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), compile="aot_eager")
    monkeypatch.setattr(torch, "compile", _compile_with(broken))
    assert new_tokens(model, prompt(10), speculator) == new_tokens(model, prompt(10))
    (reason,) = speculator.stats.fallbacks
    assert "did not compile" in reason


def test_compiled_forwards_follow_hooks_between_calls(tiny_model, prompt):
    """Dynamo looks for hooks only when it is asked to: steering after a first call would change nothing."""
    model = model_of(tiny_model)
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), compile="eager")
    plain = new_tokens(model, prompt(10))
    assert new_tokens(model, prompt(10), speculator) == plain
    handle = model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, output: -3 * output)
    steered = new_tokens(model, prompt(10))
    assert steered != plain
    assert new_tokens(model, prompt(10), speculator) == steered
    handle.remove()
    assert new_tokens(model, prompt(10), speculator) == plain
    assert not speculator.stats.fallbacks


def _compile_with(backend):
    compile_ = torch.compile
    return lambda function, **options: compile_(function, **{**options, "backend": backend})


@pytest.mark.parametrize(
    ("rope", "layers", "reason"),
    [((("rope_type", "dynamic"), ("rope_theta", 1e4), ("factor", 2.0)), (1,), "RoPE"), (None, (RAW_LAST,), "hook")],
)
def test_unsupported_targets_and_drafters_count_a_fallback(tiny_model, prompt, rope, layers, reason):
    model = model_of(tiny_model, rope=rope)
    drafter = FeatureDrafter(vocab_size=VOCAB_SIZE, max_nodes=6)
    drafter.layers = layers
    speculator = Speculator(drafter, compile="eager")
    assert new_tokens(model, prompt(10), speculator) == new_tokens(model, prompt(10))
    assert num_graphs() == 0
    (found,) = speculator.stats.fallbacks
    assert found.startswith("not compiled: ")
    assert reason in found


def test_rounds_that_compiled_are_marked_as_warm_up(tiny_model, prompt):
    model = model_of(tiny_model)
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), adaptive=True, compile="eager")
    rounds = list(hf_speculate.rounds(model, input_ids=prompt(10), speculator=speculator, max_new_tokens=24))
    assert sum(round.is_warm_up for round in rounds) == num_graphs() >= 1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_inductor_gives_plain_text(tiny_model, prompt, architecture):
    model = tiny_model(architecture, max_positions=2048)
    speculator = Speculator(FeatureDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), compile=True)
    assert new_tokens(model, prompt(12), speculator) == new_tokens(model, prompt(12))
    assert not speculator.stats.fallbacks


@pytest.mark.gpu
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("backend", [None, "eager", "inductor"])
def test_compiled_forwards_give_plain_text_on_a_gpu(tiny_model, prompt, backend, sampled):
    model = copy.deepcopy(tiny_model("llama", max_positions=2048, seed=1)).to("cuda")
    speculator = Speculator(FeatureDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), compile=backend)
    before = CudaGraphs.num_captured
    for length in (12, 30, 12, 30):  # compiled, captured, replayed
        text = prompt(length).to("cuda")
        torch.manual_seed(length)
        found = new_tokens(model, text, speculator, do_sample=sampled)
        torch.manual_seed(length)
        assert found == new_tokens(model, text, do_sample=sampled)
    assert not speculator.stats.fallbacks
    assert before < CudaGraphs.num_captured <= before + 2, "sizes of 1 and of 8 nodes"
