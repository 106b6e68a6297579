"""Dense matrices by the native kernel: PyTorch's products, and PyTorch itself where it has to be."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_speculate import AutoSpeculator
from hf_speculate.gguf import load_model, native, quicken
from hf_speculate.gguf.dense import DenseForward
from hf_speculate.gguf.random_files import FileShape, one_type, write_random_file

from ..support.tiny_heads import write_eagle_head


pytestmark = pytest.mark.rest


@pytest.fixture(autouse=True)
def multiplies_bf16(needs_kernel):
    if not native.library().bf16:
        pytest.skip("this CPU does not multiply bfloat16")


@pytest.fixture
def calls(monkeypatch):
    """Rows of each native product."""
    counts, library = [], native.library()
    multiply = library.multiply_dense
    monkeypatch.setattr(library, "multiply_dense", lambda *a: counts.append(a[5]) or multiply(*a))
    return counts


def linear(in_features: int, out_features: int, bias: bool) -> nn.Linear:
    layer = nn.Linear(in_features, out_features, bias=bias).to(torch.bfloat16).requires_grad_(False)
    assert quicken(nn.Sequential(layer)) == 1
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(32, 1), (96, 7), (576, 4096), (1024, 64)])
def test_products_are_those_of_pytorch(in_features, out_features, bias, calls):
    layer = linear(in_features, out_features, bias)
    for rows in (1, 2, 3, 5, 8, 16):
        inputs = torch.randn(1, rows, in_features).bfloat16()
        exact = functional.linear(
            inputs.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
        )
        found = layer(inputs)
        assert found.shape == (1, rows, out_features)
        assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all(), rows
    assert calls == [1, 2, 3, 5, 8, 16]
    apart = torch.randn(in_features, 3).bfloat16().T
    assert torch.equal(layer(apart), layer(apart.contiguous()))


def test_what_pytorch_computes(calls):
    layer = linear(64, 32, bias=True)
    assert layer(torch.randn(17, 64).bfloat16()).shape == (17, 32)
    assert layer(torch.randn(0, 64).bfloat16()).shape == (0, 32)
    inputs = torch.randn(2, 64).bfloat16().requires_grad_()
    layer(inputs).float().sum().backward()
    assert inputs.grad is not None
    layer.requires_grad_(True)
    layer(torch.randn(2, 64).bfloat16()).float().sum().backward()
    assert layer.weight.grad is not None
    twin = copy.deepcopy(layer).float()
    torch.testing.assert_close(twin(torch.ones(1, 64)), functional.linear(torch.ones(1, 64), twin.weight, twin.bias))
    assert twin.forward._layer is twin
    assert not calls


def test_heads_of_packed_targets_use_it_and_are_saved_as_they_are(tmp_path, calls):
    path = tmp_path / "model.gguf"
    write_random_file(
        path, FileShape("llama", 96, 64, 96, 3, 4, 2, 256, is_tied=False, embedding_std=1.0), one_type("Q8_0")
    )
    folder = write_eagle_head(tmp_path / "eagle", 64, 96)
    target = load_model(path)
    speculator = AutoSpeculator.from_pretrained(folder, target=target)
    request = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = torch.arange(5, 17)[None]
    assert torch.equal(target.generate(prompt, speculator=speculator, **request), target.generate(prompt, **request))
    assert calls
    speculator.drafter.save_pretrained(tmp_path / "saved")
    again = AutoSpeculator.from_pretrained(tmp_path / "saved", target=target)
    for name, values in speculator.drafter.head.state_dict().items():
        assert torch.equal(again.drafter.head.state_dict()[name], values), name


def test_heads_of_other_targets_are_left_alone(tmp_path):
    folder = write_eagle_head(tmp_path / "eagle", 64, 96)
    path = tmp_path / "model.gguf"
    write_random_file(
        path, FileShape("llama", 96, 64, 96, 3, 4, 2, 256, is_tied=False, embedding_std=1.0), one_type("Q8_0")
    )
    target = load_model(path, backend="dense")
    head = AutoSpeculator.from_pretrained(folder, target=target).drafter.head
    assert not any(isinstance(module.forward, DenseForward) for module in head.modules())
