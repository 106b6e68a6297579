"""CUDA graphs without a GPU: what is recorded and replayed, with a recorder that computes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._dynamo.utils import counters

from hf_speculate import Speculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.compilation import capture, graphs
from hf_speculate.compilation.buffers import pool_of
from hf_speculate.compilation.capture import MAX_RECORDINGS, Recorder, is_capturable
from hf_speculate.compilation.graphs import graphs_of
from hf_speculate.testing import RandomDrafter

from ..support.models import VOCAB_SIZE


REQUEST = {"max_new_tokens": 16, "do_sample": False}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def computing_record(run, inputs):
    """As `capture.record`: replays read the recorded inputs and overwrite the recorded outputs."""
    outputs = [each.clone() for each in run(*inputs)]

    def replay():
        for output, new in zip(outputs, run(*inputs), strict=True):
            output.copy_(new)

    return replay, outputs


@pytest.fixture(autouse=True)
def _recording(fresh_dynamo, monkeypatch):
    monkeypatch.setattr(capture, "record", computing_record)


@pytest.fixture
def model(tiny_model):
    model = tiny_model("llama", max_positions=2048, seed=7)
    for captures in (False, True):
        graphs_of(model, "eager", captures).by_key.clear()
    gc.collect()  # caches of earlier tests give their buffers back now
    pool_of(model)._idle.clear()
    return model


def twice(tensor):
    return [tensor * 2]


def test_recorded_once_and_replayed():
    recorder, tensor = Recorder(twice), torch.ones(2)
    before = Recorder.num_recorded
    results = []
    for value in range(4):
        tensor.fill_(value)
        results.append(recorder(tensor)[0])
    assert [result.tolist() for result in results] == [[2.0 * value] * 2 for value in range(4)], "results are copies"
    assert Recorder.num_recorded == before + 1


def test_other_addresses_are_recorded_anew_and_few_are_kept():
    recorder, tensors = Recorder(twice), [torch.full((2,), float(value)) for value in range(MAX_RECORDINGS + 2)]
    recorder(tensors[0])
    for tensor in [*tensors, *tensors]:
        assert recorder(tensor)[0].tolist() == (2 * tensor).tolist()
    assert len(recorder._recordings) == MAX_RECORDINGS


def test_what_cannot_be_recorded_runs_as_it_is(monkeypatch):
    def fail(*_args):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(capture, "record", fail)
    recorder = Recorder(twice)
    assert [recorder(torch.full((1,), 3.0))[0].item() for _ in range(3)] == [6.0, 6.0, 6.0]
    assert recorder._cannot_record


def test_on_gpus_only_and_not_what_captures_itself():
    assert is_capturable(GPU, "inductor")
    assert not is_capturable(CPU, "inductor")
    assert not is_capturable(GPU, "cudagraphs")


def test_requests_replay_the_graphs_of_the_first(model, prompt, monkeypatch):
    monkeypatch.setattr(graphs, "is_capturable", lambda *_: True)
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), compile="eager")
    before, recorded = Recorder.num_recorded, []
    for length in (12, 30, 21):
        expected = model.generate(prompt(length), **REQUEST)
        found = model.generate(prompt(length), speculator=speculator, **REQUEST)
        assert found.tolist() == expected.tolist()
        recorded.append(Recorder.num_recorded - before)
        gc.collect()  # if others have compiled before, dynamo's frames may hold the request's cache in a cycle
    assert 1 <= recorded[0] <= recorded[-1] <= counters["stats"]["unique_graphs"] <= 2
    assert not speculator.stats.fallbacks


def test_a_returned_cache_is_what_replays_wrote(model, prompt, monkeypatch):
    monkeypatch.setattr(graphs, "is_capturable", lambda *_: True)
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), compile="eager")
    request = {**REQUEST, "return_dict_in_generate": True}
    first = model.generate(prompt(10), speculator=speculator, **request)
    second = model.generate(first.sequences, **as_cache(cache_of(first)), speculator=speculator, **request)
    assert second.sequences.tolist() == model.generate(prompt(10), **{**REQUEST, "max_new_tokens": 32}).tolist()
