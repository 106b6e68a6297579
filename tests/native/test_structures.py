"""The structures that Python fills for the kernel: a copy of another size is an error before anything is computed."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import pytest

from hf_speculate_gguf.native import binding, compiler


# Not `needs_kernel`: that skips if structures differ.
pytestmark = pytest.mark.skipif(not any(map(shutil.which, compiler._COMPILERS)), reason="there is no C++ compiler")

NAMES = ("AttentionCall", "Call", "Delta", "Draft", "Growth", "Layer", "Matrix", "OpenMP", "Ranking", "Step")


def load() -> binding.Library:
    """The library, loaded once more."""
    return binding.Library(Path(binding.library()._functions._name))


def test_library_loads_if_all_structures_have_the_kernels_sizes():
    assert sorted(binding.MIRRORED) == sorted(NAMES)
    assert load().kinds == binding.library().kinds


@pytest.mark.parametrize("name", NAMES)
def test_library_refuses_a_structure_with_another_size(name, monkeypatch):
    structure = binding.MIRRORED[name]
    changed = type("Changed", (structure,), {"_fields_": [("added", ctypes.c_int64)]})
    monkeypatch.setitem(binding.MIRRORED, name, changed)
    sizes = f"{ctypes.sizeof(structure)} bytes in the kernel and {ctypes.sizeof(structure) + 8} in Python (Changed in "
    with pytest.raises(binding.NativeError, match=re.escape(f"structure {name} has {sizes}")):
        load()
