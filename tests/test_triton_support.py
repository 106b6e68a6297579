"""The kernel that tells whether kernels run here: interpreted, compiled for an H100, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from hf_speculate import triton_support
from hf_speculate.triton_support import probe

from .support.triton_kernels import compile_for_hopper


triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


def test_probe_writes_its_numbers(interpreted):
    assert probe(torch.device("cpu")).tolist() == list(range(16))


def test_probe_compiles_for_a_gpu(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_support, "tl", tl)
    kernel = triton.jit(triton_support._count)
    assert "st.global" in compile_for_hopper(kernel, {"outputs": "*i32"}, {"BLOCK": 16})


@pytest.mark.gpu
def test_probe_runs_on_a_gpu():
    assert probe(torch.device("cuda")).tolist() == list(range(16))
