"""Requests of every drafter while another thread loads models in bf16, which changes torch's default dtype meanwhile.

The nightly tier runs ten minutes of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import pytest
import torch
from transformers import AutoModelForCausalLM

from ..support.every_drafter import CASES, DRAFTERS, PYCODER, Targets
from ..support.tiers import quick


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> Targets:
    return Targets(tmp_path_factory.mktemp("targets"))


@contextmanager
def models_loading() -> Iterator[None]:
    """Another thread loads a model, drops it and changes the default dtype, again and again."""
    ends = threading.Event()

    def load() -> None:
        while not ends.is_set():
            AutoModelForCausalLM.from_pretrained(PYCODER, dtype=torch.bfloat16)
            for dtype in (torch.float16, torch.float32) * 20:
                torch.set_default_dtype(dtype)
                ends.wait(1e-3)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("case", quick(CASES, CASES[0], CASES[2], CASES[7], CASES[9]), ids=lambda case: case[0])
def test_requests_are_equal_while_a_model_loads(targets, case):
    name, drafter = case
    plain = [targets.text(name, sample) for sample in (False, True)]
    speculator = targets.speculator(name, drafter)
    with models_loading():
        found = [targets.text(name, sample, speculator) for sample in (False, True)]
    assert all(map(torch.equal, found, plain))


@pytest.mark.slow
def test_ten_minutes_of_requests_are_equal_while_models_load(targets):
    known = {(name, sample): targets.text(name, sample) for name in DRAFTERS for sample in (False, True)}
    speculators = {case: targets.speculator(*case) for case in CASES}
    ends, num_requests = time.monotonic() + 600, 0
    with models_loading():
        for name, drafter in cycle(CASES):
            for sample in (False, True):
                found = targets.text(name, sample, speculators[name, drafter])
                assert torch.equal(found, known[name, sample]), (name, drafter, sample)
                num_requests += 1
            if time.monotonic() > ends:
                break
    assert num_requests > 2 * len(CASES), "every drafter more than once"
    print(num_requests, "requests")  # noqa: T201
