"""`provenance.json`: the origin of a head, as its training recorded it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hf_speculate.files import check_kinds, read_json


PROVENANCE_FILE = "provenance.json"
_MAX_BYTES = 16 << 20

# Types of the fields that some code reads.
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("identity", "identity.weights", "adapters", "target", "data", "head", "batch", "metrics"), dict),
    **dict.fromkeys(("recipe", *(f"recipe.{name}" for name in ("method", "data", "training", "output"))), dict),
    **dict.fromkeys((f"identity.{name}" for name in ("vocab_size", "hidden_size", "num_hidden_layers")), int),
    **dict.fromkeys(("identity.architecture", "identity.quantization", "target.name", "chat_template", "status"), str),
    **dict.fromkeys(("recipe.method.name", "recipe.data.train", "recipe.data.eval"), str),
    **dict.fromkeys(("recipe.output.push_to_hub", "recipe.output.notes"), str),
    **dict.fromkeys(("recipe.data.max_length", "evaluation_prompts"), int),
    "sessions": list,
}


def read_provenance(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The content of a folder's `provenance.json`; None if there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or a field that some code uses has another type.
    """
    path = Path(folder) / PROVENANCE_FILE
    if not os.path.lexists(path):
        return None
    provenance = read_json(path, _MAX_BYTES)
    check_kinds(path, provenance, _KINDS)
    return provenance
