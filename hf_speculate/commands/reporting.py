"""What the `bench` commands share: options, and how results are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text
from transformers.utils import logging

from ..errors import SpeculateError
from .grid import Grid
from .shapes import SHAPES


JsonOnly = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Out = Annotated[Path | None, typer.Option(help="Write the JSON here too.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer prompts, tokens and repeats: under a minute.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of torch (default: torch's own).")]
Device = Annotated[str | None, typer.Option(help="Default: the accelerator if there is one.")]
Repeats = Annotated[int | None, typer.Option(min=1, help="Repeats; figures are medians over them.")]
Target = Annotated[str | None, typer.Option(help="Path or Hub id (default: examples/pycoder).")]
Specs = Annotated[
    list[str] | None, typer.Option("--speculator", "-s", help="NAME_OR_PATH:option=value,... (repeatable).")
]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts", help="JSON lines with prompt, text, question, turns (Spec-Bench) or messages (repeatable)."
    ),
]
Category = Annotated[list[str] | None, typer.Option(help="Only prompts of this category (repeatable).")]
Limit = Annotated[int | None, typer.Option(min=1, help="Prompts of each file, spread over its categories.")]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")]
TargetDtype = Annotated[str, typer.Option("--dtype", help="auto (the checkpoint's), float32, bfloat16, float16.")]
Temperatures = Annotated[
    list[float] | None, typer.Option("--temperature", min=0, help="Repeatable; 0 is greedy (default: 0 and 1).")
]
Shape = Annotated[str, typer.Option(help=f"Random weights, one of {', '.join(SHAPES)}.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Fewer layers than the shape has, where it does not fit.")]
Rates = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        help="Share of the rounds accepted to depth 1, 2, ...: 0.8,0.6,0.4; or FILE.json[@SPECULATOR], statistics or "
        "the result of `bench acceptance`.",
    ),
]


def prepare(threads: int | None) -> None:
    """Quietens progress bars of transformers and sets the number of threads."""
    logging.disable_progress_bar()
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
    """Tables, then the whole result as one line of JSON, the last one of stdout."""
    line = json.dumps(rounded(result))
    save_line(line, out)
    if not json_only:
        show(parts, markdown)
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
