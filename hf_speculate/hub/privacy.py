"""What must not leave a machine: tokens and passwords, and where its files lie.

Tokens are known by the name that they go by (`hub_token`, `WANDB_API_KEY`, `password`) or by their look (`hf_…`). Paths
are cut to their last part; one in the Hub's cache becomes the id of its repository.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SpeculateError
from .card import CARD_FILE, is_generated


MASK = "***"

# Files of a head that name models, data and commands. Weights and tokenizers do not.
_JSON_FILES = ("config.json", "adapter_config.json", "provenance.json")

_SECRET = "token|secret|password|passwd|pwd|passphrase|credentials?|authorization|auth|apikey|key"
_SECRET_NAME = re.compile(rf"(?:^|_)(?:{_SECRET})$")
_NAMES_OF_TEXT = re.compile(
    r"^key$|(?:^|_)(?:bos|eos|pad|unk|sep|cls|mask|image|video|audio|start|end|special|first|last|stop)_token$"
)
_PASSWORD_NAME = re.compile(r"(?:^|_)(?:secret|password|passwd|pwd|passphrase)$")
_REVISION_NAME = re.compile(r"(?:revision|commit|hash|sha\d*|fingerprint|digest)$")

# Nothing else looks like one of these.
_LOOKS = re.compile(
    r"""
    -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | (?<![A-Za-z0-9])(?:
        hf_(?:oauth_|app_)?(?:(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{16,}|[a-z]{24,})
        | api_org_[A-Za-z0-9]{16,}
        | sk-(?=[A-Za-z_-]*[0-9])[\w-]{20,}
        | wandb_v1_\w{20,} | local-[0-9a-f]{40}
        | gh[oprsu]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{16,}
        | xox[abeprs]-[\w-]{10,} | AKIA[0-9A-Z]{16} | AIza[\w-]{30,}
        | nvapi-[\w-]{20,} | gsk_[A-Za-z0-9]{20,} | r8_[A-Za-z0-9]{30,}
        | eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?
    )
    """,
    re.VERBOSE | re.DOTALL,
)
_USER_IN_URL = re.compile(r"(?<=://)(?!git@|\*\*\*@)[^/\s@\"'<>]+(?=@)")
_AUTHORIZATION = re.compile(
    r"(?i)(?P<head>\bauthorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token)\s+)?|\bbearer\s+(?=\S*\d))"
    r"(?!\*\*\*)(?P<value>[^\s\"',;]{8,})"
)
_ASSIGNMENT = re.compile(
    rf"(?i)(?P<head>(?<![\w.-])(?P<name>[\w.-]*(?:{_SECRET}))[\"']?\s*(?P<sep>[=:])\s*)"
    r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;&}\])]+)"
)
# Keys of wandb look like this, and so do commits of git.
_HEX = re.compile(
    r"(?P<head>(?<![\w.-])(?P<name>[\w.-]+)[\"']?\s*[=:]\s*[\"']?)?(?<![\w/@.-])(?P<value>[0-9a-f]{40})(?![\w-])"
)

_CACHED_REPOSITORY = re.compile(r"(?:models|datasets|spaces)--(?P<id>[^/\\]+)[/\\]snapshots[/\\][^/\\]+(?P<rest>.*)$")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOCAL = re.compile(r"(?:file:/+|/|~[\w.-]*[/\\]|[A-Za-z]:[\\/]|\\\\)")
# A path amid other text has two parts at least: "/think" is a word. URLs and links of Markdown are none.
_PATH_IN_TEXT = re.compile(
    r"(?P<kept>(?<![\w+.-])(?!file:)[A-Za-z][\w+.-]*://[^\s\"'<>]*|\]\([^)\s]*\))"
    r"|(?<![\w/.~\\-])(?:file:/+|~[\w.-]*/|[A-Za-z]:[\\/]|/(?=[^\s\"'<>|,;()\[\]{}`:/]+/))[^\s\"'<>|,;()\[\]{}`:]*"
)


def is_secret_name(name: str) -> bool:
    """Whether what goes by that name is a token, a key or a password; `pad_token` and its like are not."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").rpartition(".")[2].lower()
    return bool(_SECRET_NAME.search(name)) and not _NAMES_OF_TEXT.search(name)


def find_secret(value: Any, place: str = "") -> str | None:
    """Where in nested values a token or a password is, as `section.key`; None if there is none."""
    name = place.rpartition(".")[2]
    if _is_secret(name, value):
        return place
    if isinstance(value, str):
        found: Any = _LOOKS.search(value) or _USER_IN_URL.search(value) or _AUTHORIZATION.search(value)
        if not found and not re.search(r"\s", value):  # e.g. a URL's query; prose is only masked
            found = _ASSIGNMENT.sub(_mask_assigned, value) != value
        return place if found else None
    for key, item in _items(value):
        if place_of_item := find_secret(item, f"{place}.{key}".lstrip(".")):
            return place_of_item
    return None


def masked(value: Any, name: str = "") -> Any:
    """A copy of nested values without their secrets.

    Args:
        name: what `value` goes by.
    """
    if _is_secret(name, value):
        return MASK
    if isinstance(value, str):
        return _masked_text(value, name)
    return _mapped(value, masked)


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without its secrets: `--token X` and `--token=X`, too."""
    shown, is_next = [], False
    for argument in map(str, arguments):
        name, equals, value = argument.partition("=")
        if is_next and not argument.startswith("--"):
            shown.append(MASK)
        elif equals and is_secret_name(name.lstrip("-")) and value:
            shown.append(f"{name}={MASK}")
        else:
            shown.append(masked(argument))
        is_next = argument.startswith("-") and not equals and is_secret_name(argument.lstrip("-"))
    return shown


def without_local_paths(value: Any, name: str = "") -> Any:
    """A copy of nested values in which absolute paths of this machine are cut to their last part."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        if _LOCAL.match(value) and "\n" not in value:
            return _last_part(value)
        option, equals, assigned = value.partition("=")
        if equals and re.fullmatch(r"[\w.-]+", option):
            return f"{option}={without_local_paths(assigned)}"
        return _PATH_IN_TEXT.sub(lambda match: match["kept"] or _last_part(match[0]), value)
    return _mapped(value, without_local_paths)


def publishable(value: Any) -> Any:
    """What may be read by everybody: neither secrets nor paths."""
    return without_local_paths(masked(value))


def clean_folder(folder: str | os.PathLike) -> None:
    """Makes the files of a saved head `publishable`, in place: its configs, provenance, and cards that are generated.

    Raises:
        SpeculateError: one of them cannot be read or written.
    """
    root = Path(folder)
    try:
        for path in (path for name in _JSON_FILES for path in root.rglob(name)):
            content = json.loads(path.read_text(encoding="utf-8"))
            if (cleaned := publishable(content)) != content:
                path.write_text(json.dumps(cleaned, indent=2) + "\n", encoding="utf-8")
        for path in root.rglob(CARD_FILE):
            text = path.read_text(encoding="utf-8")
            may_change = path.parent != root or is_generated(path)  # PEFT's own, and ours; words of a person stay
            if (cleaned := publishable(text)) != text and may_change:
                path.write_text(cleaned, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpeculateError(f"cannot make {root} ready for the Hub: {error}") from error


def _is_secret(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool | float) or not is_secret_name(name):
        return False
    if isinstance(value, int):
        return bool(_PASSWORD_NAME.search(name.lower()))
    return bool(value) and not (isinstance(value, str) and value.startswith("<") and value.endswith(">"))


def _masked_text(text: str, name: str) -> str:
    text = _USER_IN_URL.sub(MASK, _LOOKS.sub(MASK, text))
    text = _ASSIGNMENT.sub(_mask_assigned, _AUTHORIZATION.sub(rf"\g<head>{MASK}", text))
    return text if _REVISION_NAME.search(name) else _HEX.sub(_mask_hex, text)


def _mask_assigned(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"].strip("\"'")
    # "a token: its probability" is prose.
    is_plain = re.fullmatch(r"(?i)token|secret|auth|credentials?|\w*(?<!_)key", name) is not None
    is_prose = match["sep"] == ":" and is_plain and not set(match["head"]) & set("\"'")
    is_none = value.lower() in ("", "null", "none", "true", "false", MASK)
    has_own_rule = name.lower().endswith("authorization")
    if is_prose or is_none or has_own_rule or not _is_secret(name, value):
        return match[0]
    return match["head"] + match["value"].replace(value, MASK)


def _mask_hex(match: re.Match[str]) -> str:
    if match["name"] and _REVISION_NAME.search(match["name"].lower()):
        return match[0]
    return (match["head"] or "") + MASK


def _last_part(path: str) -> str:
    if cached := _CACHED_REPOSITORY.search(path):
        return cached["id"].replace("--", "/", 1) + cached["rest"].rstrip("/\\")
    parts = [part for part in re.split(r"[\\/]+", path) if part]
    if not parts:
        return path
    # A commit alone would say nothing, and looks like a key.
    return "/".join(parts[-2:]) if _COMMIT.fullmatch(parts[-1]) else parts[-1]


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _mapped(value: Any, function: Callable[[Any, str], Any]) -> Any:
    if isinstance(value, Mapping):
        return {_shown_key(key): function(item, str(key)) for key, item in value.items()}
    return [function(item, "") for item in value] if isinstance(value, list | tuple) else value


def _shown_key(key: Any) -> Any:
    return _LOOKS.sub(MASK, key) if isinstance(key, str) else key
