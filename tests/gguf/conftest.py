"""Reading that must not come to the weights."""

from __future__ import annotations

import pytest

from hf_speculate.gguf.matrices import TensorRows


@pytest.fixture
def no_weights(monkeypatch):
    """Fails where the bytes of a weight matrix are read."""

    def refuse(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(TensorRows, "read", refuse)
