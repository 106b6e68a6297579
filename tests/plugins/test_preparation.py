"""Heads are prepared at loading: the first request finds their 8-bit matrices, unless the kernel must be compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_speculate import AutoSpeculator
from hf_speculate_gguf import native
from hf_speculate_gguf.native import binding, quantized
from hf_speculate_plugins.heads import can_prepare


EXAMPLES = Path(__file__).parents[2] / "examples"
HEADS = ("pycoder-eagle3", "pycoder-dspark", "pycoder-medusa")


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(EXAMPLES / "pycoder", dtype=torch.float32).eval()


@pytest.fixture
def made(monkeypatch):
    """The layers of which 8-bit matrices were made so far."""
    layers, of = [], quantized.QuantizedMatrix.of

    def noted(layer):
        layers.append(layer)
        return of(layer)

    monkeypatch.setattr(quantized.QuantizedMatrix, "of", noted)
    return layers


def request(target, speculator):
    ids = torch.arange(5, 17, dtype=torch.long, device="cpu")[None]
    return target.generate(ids, speculator=speculator, max_new_tokens=6, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("head", HEADS)
def test_prepare_leaves_no_matrix_to_the_first_request(needs_kernel, target, made, head):
    speculator = AutoSpeculator.from_pretrained(EXAMPLES / head, target=target)
    assert made
    del made[:]
    request(target, speculator)
    assert not made


@pytest.mark.parametrize("head", HEADS)
def test_prepare_leaves_everything_to_the_first_request_before_the_kernel_is_compiled(
    needs_kernel, target, made, monkeypatch, head
):
    monkeypatch.setattr(native, "needs_compiler", lambda: True)
    speculator = AutoSpeculator.from_pretrained(EXAMPLES / head, target=target)
    assert not made
    request(target, speculator)
    assert made


def test_prepare_asks_for_no_kernel_on_other_devices(monkeypatch):
    monkeypatch.setattr(native, "needs_compiler", lambda: pytest.fail("asked"))
    assert not can_prepare(torch.device("cuda"))


def test_needs_compiler_until_the_library_is_kept(needs_kernel, monkeypatch, tmp_path):
    assert not native.needs_compiler(), "it is loaded"
    binding.library.cache_clear()
    try:
        assert not native.needs_compiler(), "it is in the cache"
        monkeypatch.setenv("HF_SPECULATE_CACHE", str(tmp_path))
        assert native.needs_compiler()
    finally:
        monkeypatch.undo()
        binding.library()
