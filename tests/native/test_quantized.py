"""Matrices in 8 bits for drafts: products near the exact ones, and PyTorch's where they have to be."""

from __future__ import annotations

import copy

import gguf
import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_speculate import AutoSpeculator
from hf_speculate_gguf import load_model
from hf_speculate_gguf.native import QuantizedLinear, quantize_for_drafting
from hf_speculate_gguf.native import binding as native
from hf_speculate_gguf.native.quantized import QuantizedMatrix, _blocks
from hf_speculate_gguf.native.quantized_layers import QuantizedForward

from ..support.random_gguf import FileShape, one_type, write_random_file
from ..support.tiny_heads import write_eagle_head


pytestmark = pytest.mark.usefixtures("needs_kernel")

# Of random weights and inputs, both quantised to 8 bits in blocks of 32.
ROUNDING = 0.01


def linear(in_features=512, out_features=272, bias=False, dtype=torch.float32) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=bias).to(dtype).requires_grad_(False)


def quantized(**changes) -> nn.Linear:
    layer = linear(**changes)
    assert quantize_for_drafting(nn.Sequential(layer)) == 1
    return layer


def error(found: torch.Tensor, layer: nn.Linear, inputs: torch.Tensor) -> float:
    """Relative to the products of the layer in float64."""
    bias = None if layer.bias is None else layer.bias.double()
    exact = functional.linear(inputs.double(), layer.weight.double(), bias)
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.fixture
def calls(monkeypatch):
    """Rows of each native product."""
    counts, library = [], native.library()
    multiply = library.multiply
    monkeypatch.setattr(library, "multiply", lambda *a: counts.append(len(a[0])) or multiply(*a))
    return counts


class TestMatrix:
    def test_quantized_matrix_has_the_blocks_of_gguf(self):
        rows = torch.randn(7, 96) * torch.logspace(-6, 4, 7)[:, None]
        rows[2, :40] = 0
        expected = gguf.quantize(rows.numpy(), gguf.GGMLQuantizationType.Q8_0)
        assert torch.equal(_blocks(rows), torch.from_numpy(expected))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize(("in_features", "out_features"), [(32, 1), (96, 7), (576, 4096), (1024, 64)])
    def test_quantized_products_are_near_the_exact_ones(self, in_features, out_features, bias, dtype):
        layer = linear(in_features, out_features, bias, dtype)
        matrix = QuantizedMatrix.of(layer)
        for rows in (1, 3, 16, 33):
            inputs = torch.randn(2, rows, in_features, dtype=dtype)
            found = matrix(inputs)
            assert found.shape == (2, rows, out_features)
            assert found.dtype is dtype
            assert error(found, layer, inputs) < 2 * ROUNDING

    def test_quantized_matrix_packs_many_rows_in_parts(self, monkeypatch):
        layer = linear(64, 200)
        whole = QuantizedMatrix.of(layer).packed
        monkeypatch.setattr("hf_speculate_gguf.native.quantized.BUFFER_WEIGHTS", 64 * 40)
        assert torch.equal(QuantizedMatrix.of(layer).packed, whole)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e9])
    def test_quantized_matrix_refuses_unsupported_weights(self, value):
        layer = linear(64, 40)
        layer.weight[33, 7] = value
        assert QuantizedMatrix.of(layer) is None
        assert QuantizedMatrix.of(linear(40, 40)) is None
        assert QuantizedMatrix.of(linear(dtype=torch.float16)) is None
        assert QuantizedMatrix.of(linear().to("meta")) is None


class TestLayers:
    def test_quantized_layer_quantizes_few_rows_only(self, calls):
        for dtype, most in ((torch.float32, 64), (torch.bfloat16, 16)):
            layer = quantized(dtype=dtype, bias=True)
            for rows in (1, 2, most):
                inputs = torch.randn(1, rows, 512, dtype=dtype)
                assert error(layer(inputs), layer, inputs) < 2 * ROUNDING
            inputs = torch.randn(most + 1, 512, dtype=dtype)
            assert torch.equal(layer(inputs), functional.linear(inputs, layer.weight, layer.bias))
            assert layer(torch.randn(0, 512, dtype=dtype)).shape == (0, 272)
            assert calls == [1, 2, most]
            calls.clear()

    def test_quantized_layer_leaves_gradients_and_autocast_to_pytorch(self, calls):
        layer = quantized()
        inputs = torch.randn(2, 512).requires_grad_()
        layer(inputs).sum().backward()
        assert inputs.grad is not None
        layer.requires_grad_(True)
        layer(torch.randn(2, 512)).sum().backward()
        assert layer.weight.grad is not None
        with torch.autocast("cpu"), torch.no_grad():
            assert layer(torch.randn(2, 512)).dtype is torch.bfloat16
        assert not calls

    def test_quantized_layer_leaves_compiled_calls_to_pytorch(self, calls):
        layer, inputs = quantized(), torch.randn(2, 512)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        assert torch.equal(compiled(inputs), functional.linear(inputs, layer.weight))
        assert not calls

    @pytest.mark.parametrize("change", ["written to", "another", "another bias", "moved", "of another type"])
    def test_quantized_layer_packs_changed_weights_again(self, change):
        layer, inputs = quantized(bias=True), torch.randn(2, 512)
        layer(inputs)
        if change == "written to":
            layer.weight.mul_(-3)
        elif change == "another":
            layer.weight = nn.Parameter(torch.randn_like(layer.weight), requires_grad=False)
        elif change == "another bias":
            layer.bias = nn.Parameter(torch.randn_like(layer.bias), requires_grad=False)
        elif change == "moved":
            layer.weight.data = torch.randn_like(layer.weight)
        else:
            layer, inputs = layer.bfloat16(), inputs.bfloat16()
        assert error(layer(inputs), layer, inputs) < 2 * ROUNDING

    def test_quantized_layer_leaves_unsupported_weights_to_pytorch(self, calls, monkeypatch):
        layer, inputs = quantized(), torch.randn(2, 512)
        layer.weight[3, 4] = 1e9
        packed, of = [], QuantizedMatrix.of
        monkeypatch.setattr(QuantizedMatrix, "of", lambda matrix: packed.append(1) or of(matrix))
        for _ in range(3):
            assert torch.equal(layer(inputs), functional.linear(inputs, layer.weight))
        assert packed == [1]
        assert not calls

    def test_copies_of_a_quantized_layer_pack_their_own_weights(self, calls):
        layer, inputs = quantized(), torch.randn(2, 512)
        before = layer(inputs)
        twin = copy.deepcopy(layer)
        twin.weight.zero_()
        assert twin(inputs).abs().max() == 0
        assert torch.equal(layer(inputs), before)
        assert calls == [2, 2, 2]

    def test_quantize_for_drafting_leaves_unsupported_layers_alone(self):
        class Own(nn.Linear):
            pass

        hooked = linear()
        hooked.forward = lambda inputs: inputs  # as accelerate does
        left = [linear(64, 64), Own(512, 272), linear(dtype=torch.float16), linear().to("meta"), hooked]
        assert quantize_for_drafting(nn.ModuleList(left)) == 0
        assert quantize_for_drafting(nn.Sequential(quantized())) == 0, "twice"

    def test_quantized_linear_leaves_its_source_layer_unchanged(self, calls):
        layer, inputs = linear(), torch.randn(2, 512)
        drafting = QuantizedLinear(layer)
        assert error(drafting(inputs), layer, inputs) < ROUNDING
        assert calls == [2]
        assert torch.equal(layer(inputs), functional.linear(inputs, layer.weight))
        assert drafting.weight is layer.weight
        assert not drafting.state_dict()


@pytest.fixture
def write(tmp_path):
    """A model in a file, and an EAGLE head for it."""
    path = tmp_path / "model.gguf"
    shape = FileShape("llama", 512, 256, 512, 3, 4, 2, 256, is_tied=False, embedding_std=1.0)
    write_random_file(path, shape, one_type("Q8_0"))
    return path, write_eagle_head(tmp_path / "eagle", 256, 512)


@pytest.mark.rest
@pytest.mark.parametrize("backend", ["native", "dense"])
def test_heads_draft_with_quantized_layers_and_save_their_own_weights(backend, write, calls, tmp_path):
    path, folder = write
    target = load_model(path, backend=backend)
    assert type(target.lm_head).forward is not QuantizedForward
    speculator = AutoSpeculator.from_pretrained(folder, target=target)
    request = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = torch.arange(5, 17)[None]
    before = target(prompt).logits
    assert torch.equal(target.generate(prompt, speculator=speculator, **request), target.generate(prompt, **request))
    assert torch.equal(target(prompt).logits, before)
    assert not any("forward" in vars(each) for each in target.modules() if isinstance(each, nn.Linear))
    head = speculator.drafter.head
    assert any(isinstance(vars(each).get("forward"), QuantizedForward) for each in head.modules())
    speculator.drafter.save_pretrained(tmp_path / "saved")
    again = AutoSpeculator.from_pretrained(tmp_path / "saved", target=target)
    for name, values in head.state_dict().items():
        assert torch.equal(again.drafter.head.state_dict()[name], values), name


def test_quantized_matrix_uses_packed_weights_without_a_copy(write):
    target = load_model(write[0], backend="native")
    matrix = QuantizedMatrix.of(target.lm_head)
    assert matrix.packed.data_ptr() == target.lm_head.packed.data_ptr()
    inputs = torch.randn(3, 256, dtype=target.dtype)
    expected = target.lm_head(inputs).float()
    assert (matrix(inputs).float() - expected).norm() < 2 * ROUNDING * expected.norm()
    assert QuantizedMatrix.of(load_model(write[0], backend="dequantize").lm_head) is None
