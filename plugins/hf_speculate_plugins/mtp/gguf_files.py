"""Draft layers in GGUF files: blocks after the model's, with `nextn` tensors (llama.cpp, `conversion/qwen.py`)."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from hf_speculate.errors import CheckpointError
from hf_speculate_gguf import (
    GgufFile,
    Matrix,
    Metadata,
    TensorRows,
    count_layers,
    find_architecture,
    read_model_file,
    read_values,
)
from hf_speculate_gguf.native import FORMATS

from ..checkpoints import check_finite


def opened(path: str, num_target_layers: int) -> GgufFile:
    """The header of a model's file, which may hold its draft layers alone.

    Raises:
        CheckpointError: no GGUF file, a broken one, one of an architecture that is not known here, or of a model of
            another depth than the target.
    """
    file = read_model_file(path)
    num_layers, _ = count_layers(Metadata(file), find_architecture(Metadata(file)).name)
    if num_layers != num_target_layers:
        raise CheckpointError(f"{path} belongs to a model of {num_layers} layers; the target has {num_target_layers}.")
    return file


def read_tensors(file: GgufFile, names: Collection[str]) -> tuple[dict[str, Tensor], dict[str, Matrix]]:
    """The values of some tensors as transformers has them, and those matrices that the file has in blocks.

    Raises:
        CheckpointError: NaN, or the file has changed.
    """
    shift = find_architecture(Metadata(file)).norm_shift
    rows = {name: TensorRows(file, file.tensors[name]) for name in names}
    tensors = {name: read_values(part) - (shift if len(part.entry.shape) == 1 else 0.0) for name, part in rows.items()}
    file.check_unchanged()
    check_finite(file.path, tensors)
    return tensors, {name: Matrix((part,)) for name, part in rows.items() if part.entry.type in FORMATS}
