"""Calls that go past dynamo: the same results for new contents, and only for the same arguments."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from hf_speculate.compilation.graphs import ASKED_OFTEN, MAX_BATCH_SIZES, MAX_GRAPHS, Compiler, Graphs, graphs_of
from hf_speculate.compilation.shortcuts import Shortcut, WatchedGraph, watching


CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def scaled(module, inputs, options):
    inputs["written"].add_(1)
    return module(inputs["x"]) * options["factor"], (None, inputs["x"] + 1), 3


@pytest.fixture
def request_(monkeypatch):
    """(run, module, inputs, names of the calls that dynamo saw); `run` is a call within one request."""
    module, seen = nn.Linear(3, 2), []
    inputs = {"x": torch.ones(4, 3), "written": torch.zeros(1)}
    compiler = Compiler("eager", Counter())
    graphs = graphs_of(module, "eager")
    original = type(graphs).get

    def get(self, function, key):
        compiled, is_new = original(self, function, key)
        assert compiled is not None
        return (lambda *a: (seen.append(key), compiled(*a))[1]), is_new

    monkeypatch.setattr(type(graphs), "get", lambda *a, _made={}: _made.setdefault(a[2], get(*a)))

    def run(inputs=inputs, factor=2.0):
        options = {"factor": factor}
        return compiler.run(module, CPU, factor, scaled, lambda: (module, inputs, options), pytest.fail)

    return run, module, inputs, seen


def test_later_calls_of_a_request_go_past_dynamo(request_):
    run, module, inputs, seen = request_
    for value in (1.0, 2.0, 3.0):
        inputs["x"].fill_(value)
        product, (nothing, more), number = run()
        with torch.no_grad():
            torch.testing.assert_close(product, module(inputs["x"]) * 2)
        assert (nothing, number, more.tolist()) == (None, 3, (inputs["x"] + 1).tolist())
    assert seen == [2.0]
    assert inputs["written"].item() == 3


def test_other_tensors_and_other_options_do_not(request_):
    run, module, inputs, seen = request_
    run()
    others = {"x": torch.full((4, 3), 5.0), "written": torch.zeros(1)}
    with torch.no_grad():
        torch.testing.assert_close(run(others)[0], module(others["x"]) * 2)
        torch.testing.assert_close(run(inputs, 3.0)[0], module(inputs["x"]) * 3)
    assert seen == [2.0, 2.0, 3.0]


def test_the_next_request_sees_what_has_changed(request_):
    run, module, inputs, _ = request_
    run()
    module.register_forward_hook(lambda _module, _args, output: output + 10)
    later = Compiler("eager", Counter())
    found = later.run(module, CPU, 2.0, scaled, lambda: (module, inputs, {"factor": 2.0}), pytest.fail)[0]
    with torch.no_grad():
        torch.testing.assert_close(found, module(inputs["x"]) * 2)


@pytest.mark.parametrize("num_calls", [0, 2])
def test_no_shortcut_where_more_or_less_than_one_graph_ran(num_calls):
    x = torch.ones(2)
    run = WatchedGraph(lambda each: [each * 2])
    with watching() as calls:
        results = [run(x) for _ in range(num_calls)]
    assert Shortcut.of((x,), calls, results) is None


def test_no_shortcut_where_the_result_is_not_what_the_graph_returned():
    x = torch.ones(2)
    with watching() as calls:
        (result,) = WatchedGraph(lambda each: [each * 2])(x)
    assert Shortcut.of((x,), calls, result + 1) is None
    assert Shortcut.of((x,), calls, result) is not None


def test_nothing_is_watched_outside():
    run = WatchedGraph(lambda each: [each])
    with watching() as calls:
        pass
    run(torch.ones(1))
    assert calls == []


def keys_chosen(graphs, wanted):
    """What `choose` answers to a row of calls; each is the first of its keys, and what could serve instead."""
    return [graphs.choose("f", keys) for keys in wanted]


def test_a_graph_that_does_more_serves_until_the_fitting_one_is_needed_often():
    graphs = Graphs("eager")
    assert keys_chosen(graphs, [(4, 8)]) == [4], "nothing is there yet"
    graphs.by_key["f", 8] = len
    assert keys_chosen(graphs, [(4, 8)] * (ASKED_OFTEN + 1)) == [8] * (ASKED_OFTEN - 1) + [4] * 2
    graphs.by_key["f", 4] = len
    assert keys_chosen(graphs, [(4, 8), (8, 16)]) == [4, 8]


def test_what_is_a_small_part_of_all_is_not_compiled():
    graphs = Graphs("eager", by_key={("f", 8): len})
    calls = ([(8,)] * 9 + [(4, 8)]) * (2 * ASKED_OFTEN)
    assert set(keys_chosen(graphs, calls)) == {8}


def test_no_new_graph_where_there_is_no_room_nor_where_it_failed():
    full = Graphs("eager", by_key={("f", size): len for size in range(8, 8 + MAX_GRAPHS)})
    assert set(keys_chosen(full, [(4, 8)] * (2 * ASKED_OFTEN))) == {8}
    failed = Graphs("eager", by_key={("f", 4): None, ("f", 8): len})
    assert set(keys_chosen(failed, [(4, 8)] * (2 * ASKED_OFTEN))) == {8}
    assert full.has_room("g", 4)


def test_every_batch_size_has_room_for_its_own_graphs():
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
