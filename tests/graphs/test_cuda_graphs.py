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


def test_can_capture_on_gpus_only():
    assert can_capture(torch.device("cuda"))
    assert not can_capture(CPU)


def test_cuda_graphs_capture_the_second_call_and_replay_later_ones(replays):
    graphs, tensor = CudaGraphs(), torch.ones(2)
    results = []
    for value in range(4):
        tensor.fill_(value)
        results.append(run(graphs, tensor)["twice"].tolist())
    assert results == [[2.0 * value] * 2 for value in range(4)]
    assert (len(replays.names), replays.num_replayed) == (1, 3)


def test_cuda_graphs_capture_each_address_and_keep_few(replays):
    graphs, tensors = CudaGraphs(), [torch.full((2,), float(value)) for value in range(MAX_CUDA_GRAPHS + 2)]
    run(graphs, tensors[0])
    for tensor in [*tensors, *tensors]:
        assert run(graphs, tensor)["twice"].tolist() == (2 * tensor).tolist()
    assert len(graphs) == MAX_CUDA_GRAPHS
    assert graphs.num_bytes == 8 * MAX_CUDA_GRAPHS


def test_failed_capture_falls_back_with_one_warning(replays, monkeypatch, logged):
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
def test_state_of_changes_with_the_model(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
    model[0].scaling = {"default": 1.0}
    before = state_of([model])
    assert state_of([model]) == before
    kept = model[0].weight  # its address must stay taken
    CHANGES[change](model)
    assert state_of([model]) != before
    del kept


def test_state_of_ignores_our_hooks_and_new_values():
    model = nn.Linear(2, 2)
    before = state_of([model])

    def ours(*_arguments):
        return None

    ours.__module__ = "hf_speculate.drafting.features"
    model.register_forward_hook(ours)
    model.weight.data.mul_(2)
    assert state_of([model]) == before


def test_cuda_graphs_are_freed_with_their_module(replays):
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

    def test_cuda_graph_replay_reads_new_values(self):
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

    def test_cuda_graphs_share_memory_and_keep_their_results(self):
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

    def test_failed_cuda_capture_leaves_other_graphs_usable(self):
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

    def test_cuda_graphs_survive_a_cleared_cublas_workspace(self):
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

    def test_cuda_graphs_are_right_in_threads_and_streams(self):
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
