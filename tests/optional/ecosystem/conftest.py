"""The bundled model and its head: real text, and drafts that are accepted."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate
from hf_speculate import AutoSpeculator

from ...support.paths import REPOSITORY


TARGET, HEAD = REPOSITORY / "examples" / "pycoder", REPOSITORY / "examples" / "pycoder-eagle3"


@pytest.fixture
def load_model():
    """A function that loads the bundled model in float32, where text is equal to the token."""
    return lambda: AutoModelForCausalLM.from_pretrained(TARGET, dtype="float32").eval()


@pytest.fixture
def model(load_model):
    return load_model()


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture
def attach_head():
    """A function that attaches the bundled EAGLE-3 head to a model; returns its speculator."""
    return lambda model: hf_speculate.attach(model, AutoSpeculator.from_pretrained(HEAD, target=model))
