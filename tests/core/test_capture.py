"""CUDA graphs without a GPU: what is recorded and replayed, with a recorder that computes; and when "auto" compiles."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters

from hf_speculate import Speculator
from hf_speculate.buffers import pool_of
from hf_speculate.capture import MAX_RECORDINGS, Recorder, is_capturable
from hf_speculate.graphs import Compiler, Trial, graphs_of
from hf_speculate.static import compiler_for
from hf_speculate.testing import RandomDrafter


VOCAB_SIZE = 96
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
    monkeypatch.setattr("hf_speculate.capture.record", computing_record)


@pytest.fixture
def model(tiny_model):
    model = tiny_model("llama", max_positions=2048, seed=7)
    for captures in (False, True):
        graphs_of(model, "eager", captures).by_key.clear()
        graphs_of(model, "eager", captures).trials.clear()
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

    monkeypatch.setattr("hf_speculate.capture.record", fail)
    recorder = Recorder(twice)
    assert [recorder(torch.full((1,), 3.0))[0].item() for _ in range(3)] == [6.0, 6.0, 6.0]
    assert recorder._cannot_record


def test_on_gpus_only_and_not_what_captures_itself():
    assert is_capturable(GPU, "inductor")
    assert not is_capturable(CPU, "inductor")
    assert not is_capturable(GPU, "cudagraphs")


def test_requests_replay_the_graphs_of_the_first(model, prompt, monkeypatch):
    monkeypatch.setattr("hf_speculate.graphs.is_capturable", lambda *_: True)
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), compile="eager")
    before, recorded = Recorder.num_recorded, []
    for length in (12, 30, 21):
        expected = model.generate(prompt(length), **REQUEST)
        found = model.generate(prompt(length), speculator=speculator, **REQUEST)
        assert found.tolist() == expected.tolist()
        recorded.append(Recorder.num_recorded - before)
    assert 1 <= recorded[0] <= recorded[-1] <= counters["stats"]["unique_graphs"] <= 2
    assert not speculator.stats.fallbacks


def test_a_returned_cache_is_what_replays_wrote(model, prompt, monkeypatch):
    monkeypatch.setattr("hf_speculate.graphs.is_capturable", lambda *_: True)
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), compile="eager")
    request = {**REQUEST, "return_dict_in_generate": True}
    first = model.generate(prompt(10), speculator=speculator, **request)
    second = model.generate(first.sequences, past_key_values=first.past_key_values, speculator=speculator, **request)
    assert second.sequences.tolist() == model.generate(prompt(10), **{**REQUEST, "max_new_tokens": 32}).tolist()


def test_auto_compiles_nothing_on_a_cpu(model, prompt):
    assert compiler_for("auto", CPU, Counter()) is None
    assert compiler_for(None, GPU, Counter()) is None
    on_gpu = compiler_for("auto", GPU, Counter())
    assert on_gpu is not None
    assert on_gpu.backend == "eager"
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), compile="auto")
    model.generate(prompt(12), speculator=speculator, **REQUEST)
    assert not counters["stats"]["unique_graphs"]
    assert not speculator.stats.fallbacks


@pytest.mark.parametrize(("compiled_seconds", "choice"), [(1.0, "compiled"), (3.0, "plain")])
def test_a_trial_takes_what_is_faster(monkeypatch, compiled_seconds, choice):
    monkeypatch.setattr("hf_speculate.graphs.AUTO_AFTER", 3)
    monkeypatch.setattr("hf_speculate.graphs.AUTO_COMPARED", 2)
    trial, choices = Trial(), []
    while not trial.is_over:
        choices.append(trial.choice)
        trial.seconds[trial.choice].append({"plain": 2.0, "compiled": compiled_seconds}[trial.choice])
    assert choices == ["plain"] * 3 + ["compiled"] * 2
    assert trial.choice == choice


def test_a_trial_changes_no_text_and_compiles_late(model, prompt, monkeypatch):
    monkeypatch.setattr("hf_speculate.graphs.AUTO_AFTER", 3)
    monkeypatch.setattr("hf_speculate.graphs.is_capturable", lambda *_: True)
    monkeypatch.setattr(
        "hf_speculate.preparation.compiler_for", lambda _b, _d, fallbacks: Compiler("eager", fallbacks, is_trial=True)
    )
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=6), compile="auto")
    model.generate(prompt(12), speculator=speculator, **{**REQUEST, "max_new_tokens": 3})
    assert not counters["stats"]["unique_graphs"], "a short request compiled"
    assert model.generate(prompt(12), speculator=speculator, **REQUEST).tolist() == (
        model.generate(prompt(12), **REQUEST).tolist()
    )
    trials = graphs_of(model, "eager", True).trials.values()
    assert any(trial.is_over for trial in trials)
    assert all(len(trial.seconds["compiled"]) <= 5 for trial in trials)
    assert not speculator.stats.fallbacks
