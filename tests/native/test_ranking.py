"""The ranking of what a head proposes: what the kernel knows. `tests/plugins/test_native_trees.py` has its results."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import TemperatureLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from hf_speculate_gguf.native import NativeRanking, QuantizedLinear, Refused, Sampling
from hf_speculate_gguf.native.quantized import QuantizedMatrix


pytestmark = pytest.mark.usefixtures("needs_kernel")


def ranking_of(output, norm=None, dtype=torch.float32, **options):
    return NativeRanking.of(output, norm, 1e-5, dtype, **options)


def linear(in_features=64):
    return nn.Linear(in_features, 112, bias=False).requires_grad_(False)


@pytest.mark.parametrize(
    "warpers",
    [
        [TypicalLogitsWarper(0.9)],
        [TopPLogitsWarper(0.9), TemperatureLogitsWarper(0.5)],
        [TemperatureLogitsWarper(0.5), TemperatureLogitsWarper(0.5)],
        [TopPLogitsWarper(0.9, min_tokens_to_keep=2)],
    ],
    ids=["unknown", "another order", "twice", "at least two"],
)
def test_ranking_leaves_unknown_warpers_to_torch(warpers):
    with pytest.raises(Refused, match=r"logits processors|several tokens"):
        Sampling.of(warpers)


def test_ranking_leaves_unsupported_matrices_to_torch():
    hooked = linear()
    hooked.forward = lambda inputs: inputs  # as accelerate puts its hooks
    for output in (nn.Sequential(linear()), linear(48), linear().to("meta"), hooked):
        with pytest.raises(Refused):
            ranking_of(output)
    with pytest.raises(Refused, match=r"float16|other sizes or weights"):
        ranking_of(linear().half(), dtype=torch.float16)
    with pytest.raises(Refused, match="weights"):
        ranking_of(linear(), nn.RMSNorm(64).bfloat16())


def test_ranking_notices_weights_that_move():
    output = linear()
    ranking = ranking_of(output, nn.RMSNorm(64))
    output.weight.mul_(2)
    assert ranking.is_current(), "it reads them where they lie"
    output.weight = nn.Parameter(output.weight.clone(), requires_grad=False)
    assert not ranking.is_current()


def test_ranking_uses_matrices_that_cannot_be_quantized_as_they_are():
    layer = linear()
    for weight, is_quantized in ((1.0, True), (1e9, False)):
        layer.weight[3, 4] = weight
        modules = ranking_of(QuantizedLinear(layer), quantize=True)._weights._modules
        assert any(isinstance(module, QuantizedMatrix) for module in modules) == is_quantized
