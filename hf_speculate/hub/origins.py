"""Provenance of a head, and the adapters of the target that it was trained for, as far as its folder says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files import check_kinds, read_json
from ..messages import get_logger
from ..models import GenerativeModel
from ..target import adapter_fingerprints


logger = get_logger(__name__)

PROVENANCE_FILE = "provenance.json"
_MAX_BYTES = 16 << 20

# Fields that are read somewhere; others may be anything.
_KINDS: dict[str, Any] = {
    "identity": dict,
    "identity.architecture": str,
    "identity.quantization": str,
    "identity.vocab_size": int,
    "identity.hidden_size": int,
    "identity.num_hidden_layers": int,
    "identity.weights": dict,
    "adapters": dict,
    "target": dict,
    "target.name": str,
    "data": dict,
    "head": dict,
    "batch": dict,
    "chat_template": str,
    "recipe": dict,
    "recipe.method": dict,
    "recipe.method.name": str,
    "recipe.data": dict,
    "recipe.data.train": str,
    "recipe.data.eval": str,
    "recipe.data.max_length": int,
    "recipe.training": dict,
    "recipe.output": dict,
    "recipe.output.push_to_hub": str,
    "recipe.output.notes": str,
    "metrics": dict,
    "evaluation_prompts": int,
    "sessions": list,
    "status": str,
}


def read_provenance(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What the folder says of its head, None if it says nothing.

    Raises:
        CheckpointError: the file cannot be read, or a field that is used somewhere is of another type.
    """
    path = Path(folder) / PROVENANCE_FILE
    if not os.path.lexists(path):
        return None
    found = read_json(path, _MAX_BYTES)
    check_kinds(path, found, _KINDS)
    return found


def warn_of_other_adapters(folder: str, target: GenerativeModel) -> None:
    """Logs one warning if the head in `folder` belongs to another adapter than the one in effect (or to none).

    Text does not depend on it, acceptance does. Adapters that were merged and unloaded cannot be seen.
    """
    if problem := adapter_mismatch(folder, target):
        logger.warning(f"{problem} The text stays the target's own, but fewer drafts will be accepted.")


def adapter_mismatch(folder: str, target: GenerativeModel) -> str:
    """What is different, "" if nothing is. Adapters are told apart by their weights, not by their names."""
    trained, now = _trained_adapters(folder), adapter_fingerprints(target)
    if set((trained or {}).values()) == set(now.values()):
        return ""
    found = f"{_listed(now)} in effect on this {type(target).__name__}"
    if trained is None:
        return f"the head {folder} does not say that it was trained for the PEFT adapter {found}."
    if not trained:
        return f"the head {folder} was trained for the target without adapters, but there is {found}."
    wanted = f"the head {folder} was trained for a target with the PEFT adapter {_listed(trained)}"
    if not now:
        return f"{wanted}, and none is in effect on this {type(target).__name__} (unless it was merged and unloaded)."
    return f"{wanted}, but another one is: {found}."


def _trained_adapters(folder: str) -> Mapping[str, str] | None:
    """Name -> fingerprint; None if the folder does not say (most heads of others)."""
    try:
        content: Any = read_provenance(folder) or {}
        if "adapters" in content:
            return {str(name): str(fingerprint) for name, fingerprint in content["adapters"].items()}
        return {} if content["target"]["adapters"] is None else None  # a head from before fingerprints were noted
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return None


def _listed(names: Mapping[str, str]) -> str:
    return " and ".join(repr(name) for name in names)
