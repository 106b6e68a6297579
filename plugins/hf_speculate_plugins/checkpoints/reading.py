"""Reading published checkpoints of heads: which files, safely, names as everybody gives them.

A folder becomes a config and named tensors (`read_checkpoint`), or names and shapes alone (`tensor_shapes`, for
`Drafter.recognizes`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_speculate.errors import CheckpointError
from hf_speculate.files import read_json

from .weight_files import check_finite, known_weight_file, named_loaders, shapes_in, weight_files


# What wrappers leave in front of names: DataParallel / DeepSpeed, a causal LM around the head, torch.compile.
WRAPPERS = ("module.", "model.", "_orig_mod.")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder as it was read.

    Attributes:
        folder: where.
        config: `config.json`, raw (no defaults filled in); empty when there is none.
        tensors: by name, wrapper prefixes stripped, on the CPU, in the dtype of the file. They may be mapped
            from it: copy what is to outlive it.
        files: the weight files that were read, names relative to `folder`.
    """

    folder: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: list[str]


def read_checkpoint(
    folder: str, *, strip: Sequence[str] = WRAPPERS, only: Callable[[str], bool] | None = None
) -> Checkpoint:
    """Reads config and weights of a folder.

    Args:
        folder: a local folder.
        strip: prefixes that are taken off names, repeatedly and in any order. (A full causal LM, as Medusa-2, needs
            its `model.`: pass `("module.", "_orig_mod.")`.)
        only: which tensors to read, by stripped name; None reads all.
    Raises:
        CheckpointError: no weights, truncated or unreadable files, a pickle with anything but tensors in it, names
            that collide after stripping, NaN or infinite weights.
    """
    files = weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, load in named_loaders(os.path.join(folder, file)):
            stripped = strip_prefixes(name, strip)
            if only is not None and not only(stripped):
                continue
            if stripped in tensors:
                raise CheckpointError(f"{folder}: two tensors are called {stripped!r} (one of them as {name!r}).")
            tensors[stripped] = load()
    check_finite(folder, tensors)
    return Checkpoint(folder=folder, config=read_config(folder), tensors=tensors, files=files)


def tensor_shapes(folder: str, *, strip: Sequence[str] = WRAPPERS) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a folder's tensors without reading weights; empty if it has no weight file that we know.

    Raises:
        CheckpointError: files that are there but cannot be read (see `read_checkpoint`).
    """
    if not known_weight_file(folder):
        return {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        found = shapes_in(os.path.join(folder, file))
        shapes.update((strip_prefixes(name, strip), shape) for name, shape in found.items())
    return shapes


def read_tensor(path: str, name: str) -> Tensor:
    """One tensor of a weight file, on the CPU; raises `CheckpointError` if it is not there (see `read_checkpoint`)."""
    for found, load in named_loaders(path):
        if found == name:
            tensor = load()
            check_finite(path, {name: tensor})
            return tensor
    raise CheckpointError(f"{path} does not hold {name}.")


def read_config(folder: str) -> dict[str, Any]:
    """`config.json` as it is, or {} when there is none."""
    path = os.path.join(folder, "config.json")
    return read_json(path) if os.path.lexists(path) else {}


def strip_prefixes(name: str, prefixes: Sequence[str]) -> str:
    """`name` without any of `prefixes` in front, however many there are."""
    while found := next((prefix for prefix in prefixes if name.startswith(prefix)), None):
        name = name[len(found) :]
    return name
