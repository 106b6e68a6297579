"""Which graphs a module has: compiled or as they are, how many, and which of them runs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from hf_speculate.graphs.graph_runner import (
    ASKED_OFTEN,
    MAX_BATCH_SIZES,
    MAX_GRAPHS,
    Graphs,
    graph_runner_for,
    graphs_of,
)


CPU, GPU = torch.device("cpu"), torch.device("cuda")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def scaled(module, inputs, options):
    inputs["written"].add_(1)
    return module(inputs["x"]) * options["factor"], (None, inputs["x"] + 1), 3


@pytest.mark.parametrize(
    ("compile", "device", "backend"),
    [(None, GPU, None), (True, GPU, "inductor"), (True, CPU, "inductor"), ("eager", CPU, "eager")],
)
def test_graphs_of_chooses_the_compiler_of_a_request(compile, device, backend):
    runner = graph_runner_for(compile, device, Counter())
    assert runner is not None
    assert runner.backend == backend


@pytest.mark.parametrize(("compile", "device"), [(None, CPU), (False, CPU), (False, GPU)])
def test_graph_runner_runs_eagerly_without_a_backend(compile, device):
    assert graph_runner_for(compile, device, Counter()) is None


def test_graph_runner_does_not_limit_captured_functions():
    graphs = Graphs(None)
    for key in range(4 * MAX_GRAPHS):
        assert graphs.get(scaled, key) == (scaled, True)
    assert graphs.get(scaled, 0) == (scaled, False)
    assert graphs_of(nn.Linear(1, 1), None).by_key == {}


def keys_chosen(graphs, wanted):
    """What `choose` answers to a row of calls; each is the first of its keys, and what could serve instead."""
    return [graphs.choose("f", keys) for keys in wanted]


def test_graphs_use_a_larger_graph_until_the_exact_one_is_frequent():
    graphs = Graphs("eager")
    assert keys_chosen(graphs, [(4, 8)]) == [4], "nothing is there yet"
    graphs.by_key["f", 8] = len
    assert keys_chosen(graphs, [(4, 8)] * (ASKED_OFTEN + 1)) == [8] * (ASKED_OFTEN - 1) + [4] * 2
    graphs.by_key["f", 4] = len
    assert keys_chosen(graphs, [(4, 8), (8, 16)]) == [4, 8]


def test_graphs_compile_no_rare_sizes():
    graphs = Graphs("eager", by_key={("f", 8): len})
    calls = ([(8,)] * 9 + [(4, 8)]) * (2 * ASKED_OFTEN)
    assert set(keys_chosen(graphs, calls)) == {8}


def test_graphs_add_none_at_the_limit_or_after_a_failure():
    full = Graphs("eager", by_key={("f", size): len for size in range(8, 8 + MAX_GRAPHS)})
    assert set(keys_chosen(full, [(4, 8)] * (2 * ASKED_OFTEN))) == {8}
    failed = Graphs("eager", by_key={("f", 4): None, ("f", 8): len})
    assert set(keys_chosen(failed, [(4, 8)] * (2 * ASKED_OFTEN))) == {8}
    assert full.has_room("g", 4)


def test_graphs_have_a_limit_per_batch_size():
    keys = [(rows, width) for rows in range(MAX_BATCH_SIZES) for width in range(MAX_GRAPHS)]
    graphs, refused = Graphs("eager"), []
    for key in keys:
        refused += [] if graphs.has_room("f", key) else [key]
        graphs.by_key["f", key] = len
    assert not refused
    assert not graphs.has_room("f", (0, MAX_GRAPHS))
    assert not graphs.has_room("f", (MAX_BATCH_SIZES, 0))
    graphs.by_key = {("f", (rows, 0)): len for rows in range(MAX_BATCH_SIZES)}
    assert graphs.has_room("f", (0, 1))
