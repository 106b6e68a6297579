"""Requests of every drafter while another thread loads models in bf16, which changes torch's default dtype meanwhile.

The nightly tier runs ten minutes of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_speculate
from hf_speculate import AutoSpeculator
from hf_speculate_gguf.native import has_kernel

from ..support.hybrid_gguf import TILED, write_hybrid
from ..support.mtp import load_target, write_target
from ..support.packed import shape_of, write_model
from ..support.paths import REPOSITORY
from ..support.tiers import quick


EXAMPLES = REPOSITORY / "examples"
PYCODER = str(EXAMPLES / "pycoder")
HEADS = [str(EXAMPLES / f"pycoder-{name}") for name in ("eagle3", "dspark", "medusa")]
# Name of a target -> drafters for it.
DRAFTERS = {
    "pycoder": [
        *HEADS,
        "suffix",
        "prompt_lookup",
        "draft_model",
        f"{HEADS[0]}+suffix",
    ],
    "qwen3_5_text": ["mtp"],
    "deepseek_v3": ["mtp"],
    "packed": ["suffix", "prompt_lookup"],
    "packed hybrid": ["suffix"],
}
CASES = [(target, drafter) for target, drafters in DRAFTERS.items() for drafter in drafters]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Callable[[str], Any]:
    @cache
    def load(name: str) -> Any:
        folder: Path = tmp_path_factory.mktemp("target")
        if name == "pycoder":
            model: Any = AutoModelForCausalLM.from_pretrained(PYCODER, dtype=torch.float32).eval()
        elif not name.startswith("packed"):
            model = load_target(write_target(folder, name))
        elif not has_kernel():
            pytest.skip("no native kernel")
        elif name == "packed":
            model = hf_speculate.load_gguf(write_model(folder / "model.gguf", shape_of("llama")), dtype="float32")[0]
        else:
            model = hf_speculate.load_gguf(write_hybrid(folder / "model.gguf", TILED), dtype="float32")[0]
        model.generation_config.pad_token_id = 0
        return model

    return load


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


def batch() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(PYCODER)
    return tokenizer(
        ["import argparse\n\n\ndef main():\n", "x = 1\n"], return_tensors="pt", padding=True, padding_side="left"
    )


def inputs_for(name: str) -> dict[str, Any]:
    if name == "pycoder":
        return dict(batch())
    ids = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(0), dtype=torch.long, device="cpu")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def text(model: Any, name: str, sample: bool, speculator: Any = None) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(**inputs_for(name), max_new_tokens=32, do_sample=sample, speculator=speculator)


def speculator_for(drafter: str, model: Any) -> Any:
    """What is loaded by transformers is loaded before: two loads at the same time disturb each other there."""
    if drafter == "draft_model":
        return AutoSpeculator.from_name("draft_model", target=model, model=str(EXAMPLES / "pycoder-draft"))
    return AutoSpeculator.from_name("mtp", target=model) if drafter == "mtp" else drafter


@pytest.mark.parametrize("case", quick(CASES, CASES[0], CASES[2], CASES[7], CASES[9]), ids=lambda case: case[0])
def test_requests_are_equal_while_a_model_loads(target, case):
    name, drafter = case
    model = target(name)
    plain = [text(model, name, sample) for sample in (False, True)]
    speculator = speculator_for(drafter, model)
    with models_loading():
        found = [text(model, name, sample, speculator) for sample in (False, True)]
    assert all(map(torch.equal, found, plain))


@pytest.mark.slow
def test_ten_minutes_of_requests_are_equal_while_models_load(target):
    known = {(name, sample): text(target(name), name, sample) for name in DRAFTERS for sample in (False, True)}
    speculators = {case: speculator_for(case[1], target(case[0])) for case in CASES}
    ends, num_requests = time.monotonic() + 600, 0
    with models_loading():
        for name, drafter in cycle(CASES):
            for sample in (False, True):
                found = text(target(name), name, sample, speculators[name, drafter])
                assert torch.equal(found, known[name, sample]), (name, drafter, sample)
                num_requests += 1
            if time.monotonic() > ends:
                break
    assert num_requests > 2 * len(CASES), "every drafter more than once"
