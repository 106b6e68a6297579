"""`provenance.json`: what a head was made from and with. It is a list of allowed fields, and says nothing else.

It is written beside a head and uploaded with it, by whoever has the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ..masking import masked
from .privacy import without_local_paths


Fields: TypeAlias = "Mapping[str, Fields] | Callable[[Any], Any]"

_LONGEST_WORD = 100


def _plain(value: Any) -> Any:
    """A number or a text."""
    is_plain = isinstance(value, str | int | float | os.PathLike)
    return without_local_paths(value) if is_plain else None


def _plain_list(value: Any) -> list[Any]:
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else []


def _settings(value: Any) -> Any:
    """Settings that have names of their own: numbers and single words, in lists and sections."""
    if isinstance(value, Mapping):
        return {without_local_paths(key): _settings(item) for key, item in value.items() if isinstance(key, str)}
    if isinstance(value, list | tuple):
        return [_settings(item) for item in value]
    shown = _plain(value)
    is_word = not isinstance(shown, str) or (len(shown) <= _LONGEST_WORD and not any(map(str.isspace, shown)))
    return shown if is_word else None


def _each(*names: str) -> dict[str, Fields]:
    return dict.fromkeys(names, _plain)


# "*": any name.
_RECIPE: Fields = {
    "target": {
        **_each("path", "revision", "dtype", "quantization", "gguf_file", "gguf_backend", "adapter", "tokenizer"),
        **_each("shard", "attn_implementation"),
        "device_map": _settings,
    },
    "data": {
        **_each("train", "eval", "max_length", "long", "chat", "turns", "append_eos", "packing", "eval_fraction"),
        **_each("seed", "split", "config", "revision", "streaming", "limit", "num_proc"),
        "columns": _settings,
    },
    "method": {**_each("name", "start_from"), **dict.fromkeys(("head", "adapter", "options"), _settings)},
    "features": _each("source", "folder"),
    "training": _settings,
    "evaluation": {
        **dict.fromkeys(("nodes", "temperatures"), _plain_list),
        **_each("max_new_tokens", "batch_size", "seed"),
        **_each("prompts", "num_prompts", "prompt_tokens", "num_rows", "patience"),
        "options": _settings,
    },
    "output": _each("folder", "layout", "push_to_hub", "private", "notes"),
}
_DATA: Fields = {
    **_each("source", "fingerprint", "num_documents", "num_tokens", "num_loss_tokens", "num_eval_documents"),
    **_each("num_given_tokens"),
    "notes": {"*": _settings},
}
_SESSION: Fields = _each("started", "from_step", "seconds", "to_step")
_FIELDS: Fields = {
    **_each("format", "written", "status", "seed", "evaluation_prompts", "chat_template"),
    "command": _plain_list,
    "recipe": _RECIPE,
    "target": {
        **_each("name", "revision", "architecture", "dtype", "attention", "parameters", "fingerprint"),
        "quantization": _settings,
        "adapters": {"*": _each("type", "base")},
    },
    "identity": {
        **_each("architecture", "vocab_size", "hidden_size", "num_hidden_layers", "quantization"),
        "weights": {"*": _plain},
    },
    "adapters": {"*": _plain},
    "data": {"train": _DATA, "eval": _DATA},
    "head": _each("method", "trained_parameters", "draft_vocabulary"),
    "batch": _each("rows_a_step"),
    "sessions": lambda value: [_allowed(_SESSION, each) for each in value] if isinstance(value, list) else [],
    "training": {
        **_each("steps", "epochs", "tokens", "last_loss", "seconds", "processes", "best_step"),
        "best_metric": _settings,
    },
    "metrics": _settings,
    "environment": {
        **_each("python", "platform", "cpu", "cpus", "threads", "load_average", "device", "cuda"),
        "drafters": _plain_list,
        "versions": _settings,
    },
    "files": {"*": _plain},
    "converted": _each("to", "from"),
}


def public_provenance(content: Mapping[str, Any]) -> dict[str, Any]:
    """The allowed fields of a provenance, without secrets and paths; everything else is left out."""
    return _allowed(_FIELDS, masked(content))


def public_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The allowed fields of a recipe."""
    return _allowed(_RECIPE, masked(recipe))


def _allowed(fields: Fields, value: Any) -> Any:
    if not isinstance(fields, Mapping):
        return fields(value)
    if not isinstance(value, Mapping):
        return None
    known = {str(key): item for key, item in value.items() if key in fields or "*" in fields}
    return {without_local_paths(key): _allowed(fields.get(key, fields.get("*", {})), known[key]) for key in known}
