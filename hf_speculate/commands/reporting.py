"""How results are printed: tables, then one line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.text import Text
from transformers.utils import logging

from ..errors import SpeculateError
from ..speculator import Speculator
from .tables import Grid


def prepare(threads: int | None) -> None:
    """Quietens progress bars of transformers, and what tables and statistics say themselves (which drafts do not pay);
    sets the number of threads."""
    logging.disable_progress_bar()
    logging.get_logger(Speculator.__module__).setLevel(ERROR)
    if threads is not None:
        torch.set_num_threads(threads)


def console() -> Console:
    """For tables on stdout; wide where that is a file or a pipe, so that no figure is cut off."""
    return Console(width=None if sys.stdout.isatty() else 160)


def show(parts: Sequence[Grid | str], markdown: bool) -> None:
    """Prints tables and lines."""
    for part in parts:
        if markdown:
            typer.echo((part.markdown() if isinstance(part, Grid) else part) + "\n")
        else:
            console().print(part.rich() if isinstance(part, Grid) else Text(part))


def report(
    result: dict[str, Any],
    parts: Sequence[Grid | str] = (),
    *,
    json_only: bool = False,
    markdown: bool = False,
    out: Path | None = None,
) -> None:
    """Prints tables, then the whole result as one line of JSON, the last one of stdout.

    A terminal gets the line where it was asked for; a file or a pipe always does.
    """
    line = json.dumps(rounded(result))
    save_line(line, out)
    if not json_only:
        show(parts, markdown)
    if json_only or not sys.stdout.isatty():
        typer.echo(line)


def save_line(line: str, out: Path | None) -> None:
    """Writes the line of JSON to `out` too. Where that fails, what was measured is printed before the error."""
    if out is None:
        return
    try:
        out.write_text(line + "\n", encoding="utf-8")
    except OSError as error:
        typer.echo(line)
        raise SpeculateError(f"cannot write {out}: {error}") from error


def rounded(value: Any) -> Any:
    """Floats to six significant digits: the rest is noise that makes the line long."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value
