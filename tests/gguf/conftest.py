"""Random files, and reading that must not come to the weights."""

from __future__ import annotations

from functools import partial

import pytest

from hf_speculate_gguf.matrices import TensorRows

from ..support.packed import write_model


@pytest.fixture
def no_weights(monkeypatch):
    """Fails where the bytes of a weight matrix are read."""

    def refuse(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(TensorRows, "read", refuse)


@pytest.fixture
def write(tmp_path):
    """Writes a random model, see `write_model`; returns its path."""
    return partial(write_model, tmp_path / "model.gguf")
