"""Kernels in place of norms, rotations and gates: what they compute, where they take part, and that nothing stays."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hf_speculate import triton_support
from hf_speculate.graphs import fused, layer_kernels
from hf_speculate.graphs.fused import fusing, places_of
from hf_speculate.graphs.layer_kernels import gated, rms_norm, rotated

from ..support.triton_kernels import compile_for_hopper


pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:TRITON_DEFAULT_FP_FUSION")

# The interpreter cuts bfloat16 off instead of rounding it; on a GPU the results are those of PyTorch.
EXACT = {torch.float16: 2**-10, torch.float32: 1e-6, torch.bfloat16: 2**-6}


@pytest.fixture
def on_cpu(monkeypatch, interpreted):
    """Modules on the CPU take part."""
    monkeypatch.setattr(fused, "DEVICES", frozenset({"cpu"}))


def inputs_of(dtype, device, *shapes):
    draws = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=draws).to(dtype).to(device) for shape in shapes]


def check_kernels(dtype, device, tolerance):
    close = {"rtol": tolerance, "atol": tolerance}
    for size in (100, 128):
        states, weight = inputs_of(dtype, device, (2, 3, size), (size,))
        norm = LlamaRMSNorm(size, eps=1e-5).to(device, dtype)
        norm.weight.data.copy_(weight)
        torch.testing.assert_close(rms_norm(states, weight, 1e-5), norm(states), rtol=max(tolerance, 2**-9), atol=1e-5)
        once = functional.rms_norm(states.double(), (size,), weight.double(), 1e-5).to(dtype)
        found = rms_norm(states, weight, 1e-5, rounds_once=True)
        torch.testing.assert_close(found, once, rtol=tolerance, atol=1e-5)
    for heads, tables in ((4, 2), (1, 1)):
        states, cos, sin = inputs_of(dtype, device, (2, 5, heads, 24), (tables, 5, 24), (tables, 5, 24))
        states = states.transpose(1, 2)
        expected, _ = apply_rotary_pos_emb(states, states, cos, sin)
        found = rotated(states, cos, sin)
        assert heads == 1 or found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, **close)
    gate, up = inputs_of(dtype, device, (3, 700), (3, 700))
    torch.testing.assert_close(gated(4 * gate, up), functional.silu(4 * gate) * up, **close)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_fused_kernels_round_as_pytorch_does(interpreted, dtype):
    check_kernels(dtype, "cpu", EXACT[dtype])


def test_rotation_kernel_compiles_without_fused_multiply_add(monkeypatch, tmp_path):
    """As in PyTorch, where it is a tensor of its own. Only the compiled code shows it."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, inputs = layer_kernels._kernels()["rotate"], dict.fromkeys(("states", "cos", "sin", "outputs"), "*bf16")
    assert "fma.rn" in compile_for_hopper(kernel, inputs, {"BLOCK": 64})
    code = compile_for_hopper(kernel, inputs, {"BLOCK": 64}, **layer_kernels._EXACT)
    assert "fma.rn" not in code
    assert "cvt.rn.bf16.f32" in code


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fused_kernels_are_right_on_a_gpu(dtype):
    check_kernels(dtype, "cuda", 2**-8)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_fusing_replaces_all_layers_and_keeps_the_logits(on_cpu, tiny_model, prompt, architecture):
    model, ids = copy.deepcopy(tiny_model(architecture)).half(), prompt(9)
    num_layers = model.config.num_hidden_layers
    assert len(places_of(model)) == 3 * num_layers + 2, "two norms and a gate a layer, the last norm, the rotation"
    calls = []

    def forward(model, ids):
        calls.append([place.names[place.name] is place.stock for place in places_of(model) if place.stock])
        return model(ids).logits

    with torch.no_grad():
        expected, found = forward(model, ids), fusing(forward)(model, ids)
    assert calls == [[True], [False]]
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=2**-8)
    assert not any("forward" in vars(each) for each in model.modules())
    assert modeling_llama.apply_rotary_pos_emb is apply_rotary_pos_emb


def test_fusing_replaces_rms_norms_of_torch(on_cpu):
    norm, (states,) = torch.nn.RMSNorm(24, eps=1e-5).half(), inputs_of(torch.float16, "cpu", (2, 3, 24))
    (place,) = places_of(norm)
    torch.testing.assert_close(place.replacement(states), norm(states), rtol=2**-9, atol=1e-5)
    assert places_of(torch.nn.RMSNorm((2, 24)).half()) == []


@pytest.mark.parametrize("name", ["Gemma's norm", "a gate with GELU", "float32", "a forward of someone else"])
def test_fusing_leaves_other_modules_alone(on_cpu, tiny_model, name):
    layer = copy.deepcopy(tiny_model("llama")).half().model.layers[0]
    if name == "Gemma's norm":
        module = GemmaRMSNorm(16).half()
        module.variance_epsilon = module.eps
    elif name == "a gate with GELU":
        config = copy.deepcopy(tiny_model("llama").config)
        config.hidden_activation = config.hidden_act = "gelu_pytorch_tanh"
        module = GemmaMLP(config).half()
    elif name == "float32":
        module = layer.mlp.float()
    else:
        module = layer.input_layernorm
        module.forward = lambda states: states
    assert places_of(module) == []


def test_fusing_is_invisible_to_other_threads_and_after_errors(on_cpu, tiny_model, monkeypatch):
    """Neither another thread, nor anybody after an error; and who replaces a forward later keeps it."""
    norm = copy.deepcopy(tiny_model("llama")).half().model.norm
    states, seen = torch.randn(1, 2, len(norm.weight)).half(), []

    def fail(norm):
        elsewhere = threading.Thread(target=lambda: seen.append(norm(states)))
        elsewhere.start()
        elsewhere.join()
        raise KeyError

    places_of(norm)
    monkeypatch.setattr(fused, "rms_norm", lambda *_: pytest.fail("the kernel ran"))
    with pytest.raises(KeyError):
        fusing(fail)(norm)
    assert torch.equal(seen[0], norm(states))
    norm.forward = lambda states: states + 1
    assert torch.equal(fusing(lambda norm: norm(states))(norm), states + 1)


def test_fusing_is_off_if_triton_cannot_build(monkeypatch, logged):
    """As where there is no C compiler, here where there is no GPU."""
    triton_support._builds.cache_clear()
    assert not triton_support._builds(0)
    assert any("forwards run without kernels of Triton" in line for line in logged())
    triton_support._builds.cache_clear()


def test_fusing_leaves_out_a_kernel_that_fails(on_cpu, tiny_model, monkeypatch):
    monkeypatch.setattr(fused, "rms_norm", lambda *_: (_ for _ in ()).throw(RuntimeError("no C compiler")))
    model = copy.deepcopy(tiny_model("llama")).half()
    assert len(places_of(model)) == model.config.num_hidden_layers + 1, "gates and rotation"


def test_fusing_does_not_keep_a_model_alive(on_cpu, tiny_model):
    model = copy.deepcopy(tiny_model("llama")).half()
    gone, found = weakref.ref(model), len(places_of(model))
    del model
    gc.collect()
    assert found
    assert gone() is None


def test_fusing_draws_no_random_numbers(on_cpu, tiny_model):
    before = torch.get_rng_state()
    places_of(copy.deepcopy(tiny_model("llama")).half())
    assert torch.equal(torch.get_rng_state(), before)
