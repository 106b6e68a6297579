"""Draft layers in GGUF files: blocks after the model's, with `nextn` tensors (llama.cpp, `conversion/qwen.py`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from hf_speculate_gguf import GgufFile, Matrix, Metadata, TensorRows, find_architecture, read_model_file, read_values
from hf_speculate_gguf.native import FORMATS

from ..checkpoints import check_finite


def opened(path: str) -> GgufFile:
    """The header of a model, which may be the draft layers alone.

    Raises:
        CheckpointError: no GGUF file, a broken one, or one of an architecture that is not known here.
    """
    file = read_model_file(path)
    find_architecture(Metadata(file))
    return file


def num_layers(file: GgufFile) -> int:
    """The number of decoder layers of the model that the file is of."""
    name = file.metadata["general.architecture"]
    return Metadata(file).size(f"{name}.block_count") - Metadata(file).get(f"{name}.nextn_predict_layers", int, 0)


def read_tensors(file: GgufFile, names: Collection[str]) -> dict[str, tuple[Tensor, Any]]:
    """The values of some tensors as transformers has them, and the matrix that may stay packed, or None.

    Raises:
        CheckpointError: NaN, or the file has changed.
    """
    shift, found = find_architecture(Metadata(file)).norm_shift, {}
    for name in names:
        entry = file.tensors[name]
        rows = TensorRows(file, entry)
        is_norm = len(entry.shape) == 1
        packed = Matrix((rows,)) if entry.type in FORMATS and not is_norm else None
        found[name] = read_values(rows) - (shift if is_norm else 0.0), packed
    file.check_unchanged()
    check_finite(file.path, {name: values for name, (values, _) in found.items()})
    return found
