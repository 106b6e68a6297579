"""The file of each tensor of a model in safetensors, under the names of files that transformers gives them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from hf_speculate.errors import CheckpointError
from hf_speculate.files import file_names

from .files import read_index, shapes_in


# A model's weights in one file, or the index of its shards, with the variant.
_OF_MODEL = (
    re.compile(r"model(?:\.(?!.*-\d{5}-of-\d{5})(.+))?\.safetensors"),
    re.compile(r"model\.safetensors\.index(?:\.(.+))?\.json"),
)


def read_weight_map(
    find: Callable[[str], str | None], place: str | os.PathLike, variant: str | None = None
) -> dict[str, str]:
    """The file of each tensor of a model in safetensors, by name.

    Args:
        find: function that returns the path of a file by its name; None if there is no such file.
        place: folder or Hub id of the model, for messages.
        variant: variant of the weights, as transformers names it; None: the weights without one.
    Raises:
        CheckpointError: there is none of the files, or it cannot be read.
    """
    name = variant_name("model.safetensors", variant)
    index, path = find(variant_name("model.safetensors.index.json", variant)), find(name)
    files = {} if index is None else read_index(index)
    if path is not None and name not in files.values():  # transformers takes the file; the index is of an earlier save
        return dict.fromkeys(shapes_in(path), name)
    if files:
        return files
    where = os.path.abspath(place) if os.path.isdir(place) else place
    raise CheckpointError(f"neither {name} nor its index is there in {where}.")


def variant_name(name: str, variant: str | None) -> str:
    """The name of a file of weights, or of their index, in a variant: "model.bf16.safetensors"."""
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


def weight_variants(folder: str | os.PathLike) -> list[str | None]:
    """The variants of a model's weights in safetensors in a folder; None, the weights without one, comes first."""
    matches = [pattern.fullmatch(name) for name in file_names(folder) for pattern in _OF_MODEL]
    return sorted({match[1] for match in matches if match is not None}, key=lambda variant: variant or "")
