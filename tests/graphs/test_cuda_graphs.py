"""What is captured, looked up and replayed, without a GPU: captures are a stand-in that computes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

from hf_speculate.graphs import cuda_graphs
from hf_speculate.graphs.cuda_graphs import MAX_CUDA_GRAPHS, CudaGraphs, can_capture, state_of
from hf_speculate.graphs.graph_runner import GraphRunner, graphs_of

from ..support.replays import stand_in


CPU = torch.device("cpu")


@pytest.fixture
def replays(monkeypatch):
    return stand_in(monkeypatch)


def twice(tensor):
    return {"twice": tensor * 2}


def run(graphs, tensor, kind="kind", function=twice):
    return graphs.run(function, kind, (tensor,), tensor.device)


def test_on_gpus_only():
    assert can_capture(torch.device("cuda"))
    assert not can_capture(CPU)


def test_the_second_call_is_recorded_and_later_ones_replay_it(replays):
    graphs, tensor = CudaGraphs(), torch.ones(2)
    results = []
    for value in range(4):
        tensor.fill_(value)
        results.append(run(graphs, tensor)["twice"].tolist())
    assert results == [[2.0 * value] * 2 for value in range(4)]
    assert (len(replays.names), replays.num_replayed) == (1, 3)


def test_other_addresses_are_recorded_too_and_few_are_kept(replays):
    graphs, tensors = CudaGraphs(), [torch.full((2,), float(value)) for value in range(MAX_CUDA_GRAPHS + 2)]
    run(graphs, tensors[0])
    for tensor in [*tensors, *tensors]:
        assert run(graphs, tensor)["twice"].tolist() == (2 * tensor).tolist()
    assert len(graphs) == MAX_CUDA_GRAPHS
    assert graphs.num_bytes == 8 * MAX_CUDA_GRAPHS


def test_what_cannot_be_recorded_runs_as_it_is(replays, monkeypatch, logged):
    def fail(*_arguments):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs, "capture", fail)
    module, tensor, runner = nn.Linear(1, 1), torch.full((1,), 3.0), GraphRunner(None, fallbacks := Counter())

    def call():
        arguments = module, tensor
        return runner.run(module, CPU, "key", doubled, lambda: arguments, pytest.fail)

    assert [call().item() for _ in range(4)] == [6.0] * 4
    assert fallbacks == {"not recorded: capturing failed (a warning gave the reason)": 1}, "once a request"
    assert [line for line in logged() if "is not captured" in line] == [
        "doubled is not captured: operation not permitted when stream is capturing"
    ]


def doubled(_module, tensor):
    return tensor * 2


CHANGES = {
    "other weights": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.clone())),
    "a hook": lambda m: m[0].register_forward_hook(lambda *_: None),
    "another mode": lambda m: m.train(),
    "a flag": lambda m: setattr(m[0], "disable_adapters", True),
    "the scale of an adapter": lambda m: m[0].scaling.update(default=0.5),
    "a method in place of its own": lambda m: setattr(m[1], "forward", lambda inputs: inputs),
    "another module": lambda m: m.append(nn.Linear(2, 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_is_recorded_again(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
    model[0].scaling = {"default": 1.0}
    before = state_of([model])
    assert state_of([model]) == before
    kept = model[0].weight  # its address must stay taken
    CHANGES[change](model)
    assert state_of([model]) != before
    del kept


def test_our_own_hooks_and_changed_values_are_no_change():
    model = nn.Linear(2, 2)
    before = state_of([model])

    def ours(*_arguments):
        return None

    ours.__module__ = "hf_speculate.drafting.features"
    model.register_forward_hook(ours)
    model.weight.data.mul_(2)
    assert state_of([model]) == before


def test_recordings_end_with_their_module(replays):
    module, tensor = nn.Linear(1, 1), torch.ones(1)
    runner = GraphRunner(None, Counter())
    for _ in range(3):
        runner.run(module, CPU, "key", twice_of, lambda: (tensor,), pytest.fail)
    assert len(graphs_of(module, None).cuda_graphs) == 1
    gone = weakref.ref(module)
    del module, runner
    gc.collect()
    assert gone() is None


def twice_of(tensor):
    return tensor * 2


@pytest.mark.gpu
class TestOnAGpu:
    """Real CUDA graphs."""

    def test_replays_read_what_the_arguments_hold(self):
        graphs, tensor = CudaGraphs(), torch.ones(4, 4, device="cuda")
        weight = torch.randn(4, 4, device="cuda")

        def product(inputs, matrix):
            return {"product": inputs @ matrix, "sum": inputs.sum()}

        for value in range(6):
            tensor.fill_(value)
            found = graphs.run(product, "kind", (tensor, weight), tensor.device)
            torch.testing.assert_close(found["product"], tensor @ weight)
            assert found["sum"].item() == 16 * value
        assert len(graphs) == 1

    def test_several_share_a_pool_and_keep_their_results(self):
        graphs = [CudaGraphs() for _ in range(5)]
        tensors = [torch.full((1000,), float(value), device="cuda") for value in range(5)]
        found = [
            [run(each, tensor)["twice"] for _ in range(3)][-1] for each, tensor in zip(graphs, tensors, strict=True)
        ]
        for value, result in enumerate(found):
            assert (result == 2.0 * value).all()
        del graphs[:3]
        gc.collect()
        assert (run(graphs[0], tensors[3])["twice"] == 6).all()

    def test_a_capture_that_fails_leaves_everything_usable(self):
        graphs, tensor = CudaGraphs(), torch.ones(3, device="cuda")
        earlier = [run(graphs, tensor, kind="earlier")["twice"].tolist() for _ in range(3)]

        def asks(inputs):
            return {"twice": inputs * float(inputs.sum())}

        for _ in range(3):
            assert run(graphs, tensor, function=asks)["twice"].tolist() == [3.0] * 3
        assert graphs.cannot_be_captured("kind")
        assert torch.rand(2, device="cuda").shape == (2,)
        torch.cuda.get_rng_state()
        assert run(graphs, tensor, kind="earlier")["twice"].tolist() == earlier[0]
        for _ in range(3):
            assert run(graphs, tensor, kind="other")["twice"].tolist() == [2.0] * 3
        assert len(graphs) == 2

    def test_a_workspace_that_is_cleared_is_not_theirs(self):
        """As inductor's own CUDA graphs do when stock's static cache is compiled beside."""
        graphs = CudaGraphs()
        inputs, weight = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((8, 4096), (4096, 512)))

        def product(states, matrix):
            return {"product": states @ matrix}

        for _ in range(3):
            graphs.run(product, "kind", (inputs, weight), inputs.device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        found = graphs.run(product, "kind", (inputs, weight), inputs.device)["product"]
        torch.testing.assert_close(found, inputs @ weight)

    def test_threads_and_streams_take_turns(self):
        graphs, tensors = CudaGraphs(), [torch.full((1 << 16,), float(value), device="cuda") for value in range(4)]
        wrong = []

        def work(value):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    if not (run(graphs, tensors[value])["twice"] == 2.0 * value).all():
                        wrong.append(value)

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
