"""Buffers of compiled forwards: at the same addresses in every round and request, never those of a visible cache."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache
from transformers.cache_utils import Cache

from hf_speculate import Speculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.graphs.buffers import MAX_IDLE, Buffers, Lease, Pool, pool_of
from hf_speculate.graphs.graph_runner import graphs_of
from hf_speculate.testing import RandomDrafter

from ..support.models import VOCAB_SIZE


REQUEST = {"max_new_tokens": 16, "do_sample": False}


class Watching:
    """A backend that runs graphs as they are, and notes where their inputs lie."""

    def __init__(self):
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, graph_module, _example_inputs):
        def run(*inputs):
            self.calls.append(tuple(each.data_ptr() for each in inputs if isinstance(each, Tensor)))
            return graph_module(*inputs)

        return run


pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture
def model(tiny_model):
    """Of this module's own: buffers and graphs stay with the model."""
    model = tiny_model("llama", max_positions=2048, seed=5)
    graphs_of(model, "eager").by_key.clear()
    gc.collect()  # caches of earlier tests give their buffers back now
    pool_of(model)._idle.clear()
    return model


@pytest.fixture
def watching(monkeypatch):
    watching, compile_ = Watching(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, **{**options, "backend": watching}))
    return watching


def speculator():
    """Trees of one width: every round is a call of one graph."""
    return Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), compile="eager")


def buffers_of(cache) -> set[int]:
    return {tensor.data_ptr() for layer in cache.layers for tensor in layer._buffers.values()}


def test_buffers_keep_their_addresses_across_rounds_and_requests(model, prompt, watching):
    mine = speculator()
    gc.disable()  # a cache that is part of a reference cycle would keep its buffers from the next request
    try:
        for length in (12, 30):
            assert model.generate(prompt(length), speculator=mine, **REQUEST).tolist() == (
                model.generate(prompt(length), **REQUEST).tolist()
            )
    finally:
        gc.enable()
    assert len(watching.calls) > 2 * len(set(watching.calls))
    assert len(set(watching.calls)) == counters["stats"]["unique_graphs"], "one set of addresses for each graph"
    assert not mine.stats.fallbacks


def test_buffers_of_a_returned_cache_are_not_reused(model, prompt):
    mine = speculator()
    first = model.generate(prompt(12), speculator=mine, return_dict_in_generate=True, **REQUEST)
    states = [(layer.keys.clone(), layer.values.clone()) for layer in cache_of(first).layers]
    tensors = [(layer.keys, layer.values) for layer in cache_of(first).layers]
    expected = first.sequences
    del first  # the caller has kept tensors of the cache only
    model.generate(prompt(30), speculator=mine, **REQUEST)
    for kept, before in zip(tensors, states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    assert expected.tolist() == model.generate(prompt(12), **REQUEST).tolist()


def test_buffers_of_a_callers_cache_are_not_reused(model, prompt):
    mine, cache = speculator(), DynamicCache(config=model.config)
    text = model.generate(prompt(12), speculator=mine, **as_cache(cache), **REQUEST)
    states = [layer.keys.clone() for layer in cache.layers]
    model.generate(prompt(30), speculator=mine, **REQUEST)
    other = DynamicCache(config=model.config)
    model.generate(prompt(20), speculator=mine, **as_cache(other), **REQUEST)
    assert all(torch.equal(layer.keys, before) for layer, before in zip(cache.layers, states, strict=True))
    assert not buffers_of(cache) & buffers_of(other)
    assert all(layer.allocate is None for layer in cache.layers)
    longer = model.generate(text, speculator=mine, **as_cache(cache), **REQUEST)
    assert longer.tolist() == model.generate(prompt(12), **{**REQUEST, "max_new_tokens": 32}).tolist()


def test_threads_use_separate_buffers(model, prompt):
    mine, found = speculator(), {}
    expected = {length: model.generate(prompt(length), **REQUEST).tolist() for length in (9, 14, 21, 33)}
    model.generate(prompt(9), speculator=mine, **REQUEST)  # both threads find an idle set to quarrel over

    def work(lengths):
        for length in lengths:
            found[length] = model.generate(prompt(length), speculator=mine, **REQUEST).tolist()

    threads = [threading.Thread(target=work, args=(lengths,)) for lengths in ((9, 14), (21, 33))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert not mine.stats.fallbacks


def test_interrupted_request_returns_its_buffers(model, prompt, watching):
    def stop(*_args):
        raise KeyboardInterrupt

    mine = speculator()
    model.generate(prompt(12), speculator=mine, **REQUEST)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt(12), speculator=mine, stopping_criteria=[stop], **REQUEST)
    gc.collect()
    before = set(watching.calls)
    model.generate(prompt(12), speculator=mine, **REQUEST)
    assert set(watching.calls) == before


def test_pool_clears_buffers_before_reuse():
    pool, cache = Pool(), Cache(layers=[])
    lease = Lease(cache, pool)
    tensor = lease.buffers(1, 512).tensor("a", (2, 3), torch.float32, torch.device("cpu"))
    tensor.fill_(float("nan"))
    del cache
    again = pool.take((1, 512)).tensor("a", (2, 3), torch.float32, torch.device("cpu"))
    assert again.data_ptr() == tensor.data_ptr()
    assert not again.any(), "0 x NaN is not 0"


def test_pool_keeps_few_sets_and_lends_each_once():
    pool = Pool()
    for size in range(MAX_IDLE + 2):
        pool.put_back({(1, size): Buffers()})
    assert len(pool._idle) == MAX_IDLE
    last = pool._idle[-1][1]
    assert pool.take((1, MAX_IDLE + 1)) is last
    assert pool.take((1, MAX_IDLE + 1)) is not last
