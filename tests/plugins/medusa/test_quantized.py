"""Medusa heads whose output matrices are multiplied in 8 bits: near the plain forward, and plain where it has to be."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

from hf_speculate.drafting import DraftRequest
from hf_speculate.graphs import GraphRunner
from hf_speculate_gguf.native import QuantizedLinear
from hf_speculate_plugins.medusa import MedusaHeads
from hf_speculate_plugins.medusa.head import QuantizedHeadForward, QuantizedOutputs
from hf_speculate_plugins.medusa.steps import CapturedSteps, PlainSteps, steps_of


pytestmark = pytest.mark.usefixtures("needs_kernel")

HIDDEN, VOCAB = 256, 600


class Target(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False).to(dtype).requires_grad_(False)

    def get_output_embeddings(self):
        return self.lm_head


def heads_of(num_matrices: int, dtype=torch.float32) -> MedusaHeads:
    blocks = 0.1 * torch.randn(3, 1, HIDDEN, HIDDEN), torch.randn(3, 1, HIDDEN)
    outputs = torch.randn(num_matrices, VOCAB, HIDDEN) if num_matrices else None
    return MedusaHeads(*blocks, outputs).to(dtype).requires_grad_(False)


def check(heads, target, outputs=None, batch_size=2, num_heads=3):
    outputs = QuantizedOutputs(heads).of(target) if outputs is None else outputs.of(target)
    features = torch.randn(batch_size, HIDDEN, dtype=heads.dtype)
    found = QuantizedHeadForward(heads, outputs)(features, num_heads)
    expected = heads(features, target.lm_head, num_heads)
    assert found.shape == (num_heads, batch_size, VOCAB)
    assert 0 < (found.float() - expected.float()).norm() < 0.02 * expected.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_matrices", [0, 1, 3])
def test_logits_are_near_those_of_the_heads(num_matrices, dtype):
    heads, target = heads_of(num_matrices, dtype), Target(dtype)
    assert len(QuantizedOutputs(heads).of(target)) == (num_matrices or 1)
    for batch_size, num_heads in ((1, 3), (2, 1), (4, 2)):
        check(heads, target, batch_size=batch_size, num_heads=num_heads)
    assert "forward" not in vars(target.lm_head)


@pytest.mark.parametrize("num_matrices", [0, 1, 3])
def test_quantised_outputs_follow_changed_matrices(num_matrices):
    heads, target = heads_of(num_matrices), Target()
    outputs = QuantizedOutputs(heads)
    check(heads, target, outputs)
    kept = outputs.of(target)
    assert all(map(lambda one, other: one is other, outputs.of(target), kept)), "made anew"
    (target.lm_head.weight if heads.output_weight is None else heads.output_weight).mul_(-2)
    check(heads, target, outputs)
    if heads.output_weight is None:
        target.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    else:
        heads.output_weight = nn.Parameter(torch.randn_like(heads.output_weight), requires_grad=False)
    check(heads, target, outputs)
    twin_heads, twin_outputs = copy.deepcopy((heads, outputs))
    if heads.output_weight is not None:
        twin_heads.output_weight.mul_(3)
    check(twin_heads, target, twin_outputs)


def test_targets_are_not_kept_alive():
    heads, target = heads_of(0), Target()
    outputs, alive = QuantizedOutputs(heads), weakref.ref(target)
    assert isinstance(outputs.of(target)[0], QuantizedLinear)
    del target
    gc.collect()
    assert alive() is None


def test_captured_heads_ask_for_none():
    """Copies would be made in vain."""
    heads, target = heads_of(0), Target()
    for runner, kind in ((None, PlainSteps), (GraphRunner("eager", Counter()), CapturedSteps)):
        outputs = QuantizedOutputs(heads)
        request = DraftRequest(target=target, input_ids=torch.zeros(1, 3, dtype=torch.long), graph_runner=runner)
        steps = steps_of(heads, outputs, request)
        assert type(steps) is kind
        assert runner is not None or type(steps._forward) is QuantizedHeadForward
        assert len(outputs._targets) == (runner is None)


def test_quantised_outputs_are_empty_where_the_kernel_cannot_multiply(monkeypatch):
    assert not QuantizedOutputs(heads_of(3, torch.float16)).of(Target())
    small = MedusaHeads(torch.randn(2, 1, 32, 32), None, torch.randn(2, 96, 32))
    assert not QuantizedOutputs(small).of(Target())
    assert not QuantizedOutputs(heads_of(3).to("meta")).of(Target())
    monkeypatch.setattr("hf_speculate_gguf.native.has_kernel", lambda: False)
    assert not QuantizedOutputs(heads_of(3)).of(Target())
