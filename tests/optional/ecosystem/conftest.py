"""The bundled model and its head: real text, and drafts that are accepted."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate
from hf_speculate import AutoSpeculator

from ...support.paths import REPOSITORY


# Arguments of every trainer: repeatable steps on the CPU, and nothing on the screen or on disk.
QUIET = {
    "learning_rate": 1e-3,
    "seed": 3,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}
# Endings of the names of logged values that depend on the clock.
TIMINGS = ("runtime", "per_second", "preparation_time", "step_time")
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


def without_timings(log):
    """The log of a trainer, without the values that depend on the clock."""
    return [{name: value for name, value in entry.items() if not name.endswith(TIMINGS)} for entry in log]
