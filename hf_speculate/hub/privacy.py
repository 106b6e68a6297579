"""Values that everybody may read: without tokens and passwords, and without the paths of this machine.

Paths are cut to their last part; one in the Hub's cache becomes the id of its repository.
"""

from __future__ import annotations

import os
import re
from typing import Any

from ..masking import mapped, masked


_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOCAL = re.compile(r"(?:file:/+|/|~[\w.-]*[/\\]|[A-Za-z]:[\\/]|\\\\)")
# A path amid other text has two parts at least: "/think" is a word. URLs and links of Markdown are none.
_PATH_IN_TEXT = re.compile(
    r"(?P<kept>(?<![\w+.-])(?!file:)[A-Za-z][\w+.-]*://[^\s\"'<>]*|\]\([^()\s]*\))"
    r"|(?<![\w/.~\\-])(?:file:/+|~[\w.-]*/|[A-Za-z]:[\\/]|/(?=[^\s\"'<>|,;()\[\]{}`:/]+/))[^\s\"'<>|,;()\[\]{}`:]*"
)


def publishable(value: Any) -> Any:
    """A copy of nested values with neither secrets nor paths."""
    return without_local_paths(masked(value))


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
    return mapped(value, without_local_paths)


def _last_part(path: str) -> str:
    parts = [part for part in re.split(r"[\\/]+", path) if part]
    for index, part in enumerate(parts[:-2]):
        if part.startswith(("models--", "datasets--", "spaces--")) and parts[index + 1] == "snapshots":
            return "/".join([part.partition("--")[2].replace("--", "/", 1), *parts[index + 3 :]])
    if not parts:
        return path
    # A commit alone would say nothing, and looks like a key.
    return "/".join(parts[-2:]) if _COMMIT.fullmatch(parts[-1]) else parts[-1]
