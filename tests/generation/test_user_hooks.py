"""Hooks of users on the target: rows stay where one may hold a value for each of them, and leave where it says not."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_speculate import Speculator
from hf_speculate.testing import RandomDrafter

from ..support.models import VOCAB_SIZE, build_tiny_model
from ..support.requests import BATCH, assert_as_plain, assert_same, run


@pytest.fixture
def model():
    return copy.deepcopy(build_tiny_model())


@pytest.fixture
def counts(model):
    """Rows of every forward."""
    counts = []

    def count(module, args):
        counts.append(len(args[0]))

    count.row_wise = True
    model.model.layers[0].mlp.register_forward_pre_hook(count)
    return counts


@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_one_with_a_value_for_each_row_keeps_the_rows(model, counts, kind):
    if kind == "forward":
        bias = torch.randn(3, 1, VOCAB_SIZE)
        model.lm_head.register_forward_hook(lambda module, inputs, output: output + bias)
    else:
        shift = torch.randn(3, 1, 32)
        model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] + shift,))
    for eos in (range(3, 9), range(20, 26)):
        assert_as_plain(model, **BATCH, max_new_tokens=30, eos_token_id=[*eos])
    assert set(counts) == {3}


def test_those_that_look_at_each_row_alone_let_rows_leave(model, counts):
    def everywhere(module, inputs, output):
        return output + 0.5

    everywhere.row_wise = True
    model.model.layers[1].mlp.register_forward_hook(everywhere)
    ends = run(model, **BATCH)[0][0, 13].item()
    counts.clear()
    speculator = Speculator(RandomDrafter(vocab_size=VOCAB_SIZE))
    plain = run(model, **BATCH, eos_token_id=ends)
    assert set(counts) == {3}
    assert_same(run(model, speculator, **BATCH, eos_token_id=ends), plain)
    assert min(counts) < 3
