"""The part of a head's origin that everybody may read: allowed fields, without secrets and without paths.

`provenance.json` is saved with a head and uploaded with it by whoever has the folder. So it holds neither secrets nor
paths of this machine: paths are cut to their last part, and one in the Hub's cache becomes the id of its repository.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from hf_speculate.messages import is_secret_name, masked


Fields: TypeAlias = "Mapping[str, Fields] | Callable[[Any], Any]"

_LONGEST_WORD = 100

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOCAL = re.compile(r"(?:file:/+|/|~[\w.-]*[/\\]|[A-Za-z]:[\\/]|\\\\)")
# A path amid other text has two parts at least: "/think" is a word. URLs and links of Markdown are none.
_PATH_IN_TEXT = re.compile(
    r"(?P<kept>(?<![\w+.-])(?!file:)[A-Za-z][\w+.-]*://[^\s\"'<>]*|\]\([^()\s]*\))"
    r"|(?<![\w/.~\\-])(?:file:/+|~[\w.-]*/|[A-Za-z]:[\\/]|/(?=[^\s\"'<>|,;()\[\]{}`:/]+/))[^\s\"'<>|,;()\[\]{}`:]*"
)


def publishable(value: Any) -> Any:
    """A copy of nested values without secrets and without paths of this machine."""
    if isinstance(value, str | os.PathLike):
        return _without_local_paths(masked(os.fspath(value)))
    if isinstance(value, Mapping):
        return {publishable(key): publishable(item) for key, item in value.items()}
    return [publishable(item) for item in value] if isinstance(value, list | tuple) else value


def _without_local_paths(text: str) -> str:
    """A text in which absolute paths of this machine are cut to their last part."""
    if _LOCAL.match(text) and "\n" not in text:
        return _last_part(text)
    option, equals, assigned = text.partition("=")
    if equals and re.fullmatch(r"[\w.-]+", option):
        return f"{option}={_without_local_paths(assigned)}"
    return _PATH_IN_TEXT.sub(lambda match: match["kept"] or _last_part(match[0]), text)


def _last_part(path: str) -> str:
    parts = [part for part in re.split(r"[\\/]+", path) if part]
    for index, part in enumerate(parts[:-2]):
        if part.startswith(("models--", "datasets--", "spaces--")) and parts[index + 1] == "snapshots":
            return "/".join([part.partition("--")[2].replace("--", "/", 1), *parts[index + 3 :]])
    if not parts:
        return path
    # A commit alone would mean nothing.
    return "/".join(parts[-2:]) if _COMMIT.fullmatch(parts[-1]) else parts[-1]


def _plain(value: Any) -> Any:
    """A number or a text; None for any other value."""
    is_plain = isinstance(value, str | int | float | os.PathLike)
    return publishable(value) if is_plain else None


def _plain_list(value: Any) -> list[Any]:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else []


def _settings(value: Any) -> Any:
    """Settings under any names but those of secrets: numbers and single words, in lists and sections."""
    if isinstance(value, Mapping):
        names = [name for name in value if isinstance(name, str) and not is_secret_name(name)]
        return {publishable(name): _settings(value[name]) for name in names}
    if isinstance(value, list | tuple):
        return [_settings(item) for item in value]
    shown = _plain(value)
    is_word = not isinstance(shown, str) or (len(shown) <= _LONGEST_WORD and not any(map(str.isspace, shown)))
    return shown if is_word else None


def _each(*names: str) -> dict[str, Fields]:
    return dict.fromkeys(names, _plain)


# "*" stands for any name.
_RECIPE: Fields = {
    "target": {
        **_each("path", "revision", "dtype", "quantization", "gguf_file", "gguf_backend", "adapter", "tokenizer"),
        **_each("shard", "attn_implementation"),
        "device_map": _settings,
    },
    "data": {
        **_each("train", "eval", "max_length", "long", "chat", "turns", "append_eos", "packing", "eval_fraction"),
        **_each("seed", "split", "config", "revision", "limit", "num_proc"),
        "columns": _settings,
    },
    "method": {**_each("name", "start_from"), **dict.fromkeys(("head", "options"), _settings)},
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
    "sessions": lambda value: [_allowed(_SESSION, session) for session in value] if isinstance(value, list) else [],
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
    "converted": _each("to", "from"),
}


def public_provenance(content: Mapping[str, Any]) -> dict[str, Any]:
    """The allowed fields of a provenance without secrets and paths; everything else is left out."""
    return _allowed(_FIELDS, content)


def public_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The allowed fields of a recipe without secrets and paths."""
    return _allowed(_RECIPE, recipe)


def _allowed(fields: Fields, value: Any) -> Any:
    if not isinstance(fields, Mapping):
        return fields(value)
    if not isinstance(value, Mapping):
        return None
    known = {str(key): item for key, item in value.items() if key in fields or "*" in fields}
    return {publishable(key): _allowed(fields.get(key, fields.get("*", {})), known[key]) for key in known}
