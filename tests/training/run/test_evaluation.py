"""Acceptance during training is what the decoding loop measures, and measuring leaves no trace."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_speculate import Speculator
from hf_speculate.errors import SpeculateError
from hf_speculate_training.methods.eagle import Eagle3Method, Eagle3TrainingOptions, new_eagle3
from hf_speculate_training.run import AcceptanceEvaluation, AcceptanceOptions, prompts_of
from hf_speculate_training.run.evaluation import evenly_spaced


@pytest.fixture
def target(saved_target):
    return AutoModelForCausalLM.from_pretrained(saved_target).eval().requires_grad_(False)


@pytest.fixture
def method(target):
    return Eagle3Method(new_eagle3(target), target, options=Eagle3TrainingOptions(steps=2))


PROMPTS = [torch.arange(10, 10 + n) for n in (9, 5, 7)]


def test_measured_acceptance_equals_the_decoding_loops(target, method):
    options = AcceptanceOptions(nodes=[6], max_new_tokens=20, batch_size=1, options={"depth": 3, "top_k": 2})
    measured = AcceptanceEvaluation(PROMPTS, options).measure(target, method)
    speculator = Speculator(method.drafter(target, max_nodes=6, depth=3, top_k=2))
    for prompt in PROMPTS:
        target.generate(prompt[None], max_new_tokens=20, do_sample=False, speculator=speculator)
    assert measured == {"mean_acceptance_length": speculator.stats.mean_acceptance_length}
    assert speculator.stats.rounds > 0


def test_every_setting_has_a_name_and_the_first_one_two(target, method):
    options = AcceptanceOptions(nodes=[2, 8], temperatures=[0, 1.0], max_new_tokens=8, options={"depth": 3})
    measured = AcceptanceEvaluation(PROMPTS, options).measure(target, method)
    assert list(measured) == [
        "mean_acceptance_length",
        "mean_acceptance_length_nodes_2",
        "mean_acceptance_length_nodes_8",
        "mean_acceptance_length_nodes_2_temperature_1",
        "mean_acceptance_length_nodes_8_temperature_1",
    ]
    assert measured["mean_acceptance_length"] == measured["mean_acceptance_length_nodes_2"]
    assert min(measured.values()) >= 1


def test_measure_leaves_no_trace(target, method):
    method.train()
    before = {name: parameter.detach().clone() for name, parameter in method.named_parameters()}
    target.generation_config.temperature = 0.3
    config, state = target.generation_config, torch.random.get_rng_state()
    options = AcceptanceOptions(temperatures=[1.0], max_new_tokens=12)
    first = AcceptanceEvaluation(PROMPTS, options).measure(target, method)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert target.generation_config is config
    assert method.training
    assert all(parameter.requires_grad for parameter in method.parameters())
    for name, parameter in method.named_parameters():
        assert torch.equal(parameter, before[name]), name
    torch.randn(7)  # another state of the generator must not matter, nor the checkpoint's own sampling
    target.generation_config.update(top_k=1, do_sample=True, repetition_penalty=3.0)
    assert AcceptanceEvaluation(PROMPTS, options).measure(target, method) == first


def test_processes_share_the_prompts(target, method):
    """Sums over two processes are those of one that runs all prompts."""

    class Process:
        num_processes, device = 2, torch.device("cpu")

        def __init__(self, index):
            self.process_index, self.counts, self.total = index, None, None

        def reduce(self, counts, how):
            assert how == "sum"
            self.counts = counts
            return counts if self.total is None else self.total

    options = AcceptanceOptions(max_new_tokens=8, batch_size=1, options={"depth": 2, "top_k": 2})
    evaluation = AcceptanceEvaluation(PROMPTS, options)
    alone = evaluation.measure(target, method)
    processes = [Process(0), Process(1)]
    for process in processes:
        evaluation.measure(target, method, process)
    total = processes[0].counts + processes[1].counts
    assert all(process.counts[1] > 0 for process in processes)
    for process in processes:
        process.total = total
        assert evaluation.measure(target, method, process) == alone


def test_a_target_that_stops_at_once_gives_zero(target, method):
    options = AcceptanceOptions(max_new_tokens=1)
    assert AcceptanceEvaluation(PROMPTS, options).measure(target, method) == {"mean_acceptance_length": 0.0}


@pytest.mark.parametrize("options", [{"nodes": []}, {"nodes": [0]}, {"temperatures": [-1.0]}])
def test_acceptance_options_refuse_impossible_values(options):
    with pytest.raises(SpeculateError, match="evaluation"):
        AcceptanceOptions(**options)


def test_prompts_are_what_precedes_the_answer():
    documents = [
        {"input_ids": [5, 6, 7, 8], "loss_mask": [False, False, True, False]},
        {"input_ids": [1, 2, 3], "loss_mask": [False, False, False]},  # nothing to emit
        {"input_ids": list(range(20)), "loss_mask": [True] * 20},  # a plain text
        {"input_ids": [9], "loss_mask": [True]},  # nothing can precede
    ]
    assert [p.tolist() for p in prompts_of(documents, 4, num_tokens=6)] == [[5, 6], [0, 1, 2, 3, 4, 5]]
    assert [p.tolist() for p in prompts_of(documents, 4, num_tokens=64)] == [[5, 6], list(range(10))]


def test_prompts_are_spread_over_the_documents():
    assert evenly_spaced(10, 3) == [0, 3, 6]
    assert evenly_spaced(2, 5) == [0, 1]
    documents = [{"input_ids": [i, i, i], "loss_mask": [False, True, True]} for i in range(9)]
    assert [int(p[0]) for p in prompts_of(documents, 3)] == [0, 3, 6]
