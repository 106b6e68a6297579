"""Random packed models; each file is written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from filelock import FileLock

from hf_speculate_gguf import load_model
from hf_speculate_gguf.native import binding as native

from ..support.packed import write_model
from ..support.random_gguf import FileShape, one_type, q4_k_m, write_random_file


MIXED = {"attn_v": "Q6_K", "attn_k": "Q2_K", "ffn_up": "Q5_1"}
DENSE = {"attn_v": "BF16", "ffn_down": "F16"}
RECIPES = {
    # Types that need sums over 16 columns, over 32, and none.
    "mixed": lambda name, columns: MIXED.get(name.split(".")[-2], "Q4_K"),
    "Q4_K_M": q4_k_m(3),
    # Some files keep a few matrices finer than the rest.
    "some dense": lambda name, columns: DENSE.get(name.split(".")[-2], "Q8_0"),
}


@pytest.fixture(scope="session")
def compiled(tmp_path_factory, worker_id) -> Callable[[str], native.Library]:
    """The kernel, compiled with further flags: up to a minute of work, done once for all workers."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder if worker_id == "master" else folder.parent

    @cache
    def compile_once(flags: str) -> native.Library:
        file = folder / f"kernel{flags.replace(' ', '')}.so"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                native.compile_kernel([*native.find_compiler(), *flags.split()], file)
        return native.Library(file)

    return compile_once


@pytest.fixture(scope="session")
def packed_file(tmp_path_factory):
    """Writes a random model of three layers and 97 tokens; returns its path."""
    folder = tmp_path_factory.mktemp("packed")

    @cache
    def write(architecture: str, recipe: str, heads: tuple[int, int], is_tied: bool) -> str:
        path = folder / f"{architecture}-{recipe}-{heads}-{is_tied}.gguf"
        head_dim = 128 if architecture == "qwen3" else None
        shape = FileShape(architecture, 97, 256, 512, 3, *heads, 512, is_tied, 1.0, head_dim)
        write_random_file(path, shape, RECIPES.get(recipe) or one_type(recipe))
        return str(path)

    return write


@pytest.fixture
def load(packed_file):
    """Loads such a model, for the kernel unless `backend=` says otherwise."""

    def _load(architecture="llama", recipe="Q4_0", dtype=torch.bfloat16, heads=(4, 2), is_tied=False, **options):
        path = packed_file(architecture, recipe, heads, is_tied)
        return load_model(path, dtype=dtype, **{"backend": "native"} | options)

    return _load


@pytest.fixture
def write(tmp_path):
    """Writes a random model, see `write_model`; returns its path."""
    return partial(write_model, tmp_path / "model.gguf")


@pytest.fixture
def calls(monkeypatch):
    """One entry for each native call that has computed a model."""
    found, library = [], native.library()
    step = library.step

    def count(address):
        found.extend([1] * (done := step(address)))
        return done

    monkeypatch.setattr(library, "step", count)
    return found
