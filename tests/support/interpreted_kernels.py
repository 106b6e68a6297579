"""Triton's kernels on a CPU."""

from __future__ import annotations

import pytest
import torch

from hf_speculate.compilation import layer_kernels
from hf_speculate.scoring import tree_kernel


@pytest.fixture
def interpreted(monkeypatch):
    """Triton's interpreter runs all kernels."""
    tl = pytest.importorskip("triton.language")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # Triton was imported without the interpreter, so its library is there to be compiled.
    monkeypatch.setattr(tl, "max", lambda block, axis: tl.reduce(block, axis, tl.standard._elementwise_max))
    monkeypatch.setattr(tl, "sum", lambda block, axis: tl.reduce(block, axis, tl.standard._sum_combine))
    _forget()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    yield
    torch.use_deterministic_algorithms(False)
    _forget()


def _forget() -> None:
    tree_kernel._kernels.cache_clear()
    layer_kernels._kernels.cache_clear()
