"""Tiny models built on the spot: no network, no files, one thread, deterministic."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import jaxtyping
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import flash_attention_mask
from transformers.utils.logging import warning_once

from hf_speculate.tree import DraftTree
from hf_speculate_gguf.native import binding as native
from hf_speculate_tools.hub import uploads

from .support.hub import FakeHub
from .support.inputs import random_prompt
from .support.models import CHAIN_ONLY, build_tiny_model, chain_only_attention
from .support.paths import SHARED, TESTS
from .support.tiers import is_rest
from .support.triton_kernels import interpreted as interpreted


# Folders of whole requests, which run with unchecked shapes.
WHOLE_REQUESTS = ("lossless", "loop", "request")

# Tests are about trees: what is drafted must not depend on the clock. Those about the policy ask for it.
os.environ["HF_SPECULATE_ADAPTIVE"] = "0"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Before `-m` looks at the markers."""
    for item in items:
        path = item.path.relative_to(TESTS).as_posix()
        if is_rest(path):
            item.add_marker(pytest.mark.rest)
        if path.startswith("scale/"):
            item.add_marker(pytest.mark.scale)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def set_threads():
    """`torch.set_num_threads`, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _warned_of_nothing():
    """What another test was warned of once is said again."""
    warning_once.cache_clear()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def unchecked_shapes():
    """Shapes are not checked: a third of the time of whole requests. Tests of the rooms run the same code checked."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _fast_requests(request):
    """`unchecked_shapes` in the folders of whole requests."""
    if request.path.relative_to(TESTS).parts[0] in WHOLE_REQUESTS:
        request.getfixturevalue("unchecked_shapes")


@pytest.fixture
def needs_kernel():
    """Skips where native code cannot be compiled."""
    if problem := native.native_problem():
        pytest.skip(f"native: {problem}")


@pytest.fixture
def logged(caplog, monkeypatch):
    """The lines that were logged so far, as a function."""
    for name in ("transformers", "hf_speculate", "hf_speculate_plugins"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def tiny_model():
    """Factory of tiny models, see `build_tiny_model`."""
    return build_tiny_model


@pytest.fixture
def prompt():
    """Factory of prompts, see `random_prompt`."""
    return random_prompt


def _random_tree(seed: int, batch_size: int, vocab_size: int, max_nodes: int = 12, roots=None) -> DraftTree:
    """Rows of random structure and width; siblings differ."""
    choose, rows = random.Random(seed), []
    for row in range(batch_size):
        root = choose.randrange(vocab_size) if roots is None else roots[row]
        tokens, parents, taken = [root], [-1], set()
        for _ in range(choose.randint(0, max_nodes)):
            parent, token = (
                choose.choice([len(tokens) - 1, choose.randrange(len(tokens))]),
                choose.randrange(vocab_size),
            )
            if (parent, token) not in taken:
                taken.add((parent, token))
                tokens.append(token)
                parents.append(parent)
        rows.append((tokens, parents))
    return DraftTree.from_rows(rows)


@pytest.fixture
def random_tree():
    """Factory of trees, see `_random_tree`."""
    return _random_tree


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub that is a folder, in the place of the real one."""
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(uploads, "HfApi", fake)
    return fake


@pytest.fixture
def chain_only():
    """Name of an attention that scores chains only, see `chain_only_attention`."""
    AttentionInterface.register(CHAIN_ONLY, chain_only_attention)
    AttentionMaskInterface.register(CHAIN_ONLY, flash_attention_mask)
    yield CHAIN_ONLY
    AttentionInterface._global_mapping.pop(CHAIN_ONLY)
    AttentionMaskInterface._global_mapping.pop(CHAIN_ONLY)


@pytest.fixture
def shared_root() -> Path:
    """The data beside the checkout; tests that want it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared beside this checkout")
    return SHARED


@pytest.fixture
def golden_root(shared_root) -> Path:
    return shared_root / "golden"


@pytest.fixture
def real_llama(shared_root):
    """stories260k, a real Llama of 260 000 parameters, fp32."""
    return AutoModelForCausalLM.from_pretrained(shared_root / "models" / "stories260k").eval()


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled, and nothing counted: functions of earlier tests would be found again."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
