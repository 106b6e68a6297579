"""The argument for a head, which commands share."""

from __future__ import annotations

from typing import Any

import typer

from hf_speculate.files import user_path
from hf_speculate.speculator.registry import check_local  # the package imports torch

from ..commands import checked


def head_argument(about: str) -> Any:
    """An argument for a head. A folder that is not there is an error before anything is loaded."""
    return typer.Argument(help=about, callback=checked(_check_head))


def _check_head(name_or_path: str) -> None:
    path = user_path(name_or_path)
    if not path.endswith(".gguf"):
        check_local(path)
