"""Output of commands: lines and tables, then one line of JSON. Nothing else in a command writes to the terminal.

Texts come from files and servers, too: consoles read no markup in them, and show control characters as such.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging import ERROR
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import replace_files, text_writer, user_path
from hf_speculate.messages import printable

from .tables import Grid


def prepare(threads: int | None) -> None:
    """Sets the number of threads; silences progress bars of transformers, and warnings that statistics repeat."""
    import torch
    from transformers.utils import logging

    from hf_speculate.speculator import Speculator

    logging.disable_progress_bar()
    logging.get_logger(Speculator.__module__).setLevel(ERROR)
    if threads is not None:
        torch.set_num_threads(threads)


class LiteralConsole(Console):
    """A console that shows texts as they are: without markup, and with control characters made visible."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Shows control characters in everything that is drawn, ready-made `Text` as well."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def console() -> Console:
    """Console for tables on stdout; wide where that is a file or a pipe, so that no figure is cut off."""
    return LiteralConsole(width=None if sys.stdout.isatty() else 400)


def say(text: Any, *, err: bool = False) -> None:
    """Prints a line, to stderr if `err`."""
    typer.echo(printable(text), err=err)


def say_json(value: Any) -> None:
    """Prints a value as one line of JSON, in ASCII without control characters."""
    typer.echo(json_line(value))


def json_line(value: Any) -> str:
    """Line that `say_json` prints."""
    return json.dumps(value).replace("\x7f", "\\u007f")


def show(parts: Sequence[Grid | str], markdown: bool) -> None:
    """Prints tables and lines."""
    for part in parts:
        if markdown:
            say((part.markdown() if isinstance(part, Grid) else part) + "\n")
        else:
            shown = console()
            shown.print(_fitted(part, shown) if isinstance(part, Grid) else Text(part))


def _fitted(grid: Grid, shown: Console) -> Table:
    """The table in the form that fits the console's width."""
    table, unbounded = grid.rich(), shown.options.update(max_width=10_000)
    return grid.rich(is_narrow=True) if shown.measure(table, options=unbounded).maximum > shown.width else table


def report(
    result: dict[str, Any],
    parts: Sequence[Grid | str] = (),
    *,
    json_only: bool = False,
    markdown: bool = False,
    out: Path | None = None,
) -> None:
    """Prints tables, then the whole result as one line of JSON, the last one of stdout.

    A file or a pipe always gets the line of JSON, a terminal only with `json_only`.
    """
    line = json_line(rounded(result))
    save_line(line, out)
    if not json_only:
        show(parts, markdown)
    if json_only or not sys.stdout.isatty():
        typer.echo(line)


def save_line(line: str, out: Path | None) -> None:
    """Writes the line of JSON to `out` too. Where that fails, the line is printed before the error."""
    if out is None:
        return
    path = Path(user_path(out))
    try:
        if path.exists() and not path.is_file():  # a pipe or a device, which stays one
            path.write_text(line + "\n", encoding="utf-8")
        else:
            path = path.resolve()
            replace_files(path.parent, {path.name: text_writer(line + "\n")})
    except (OSError, CheckpointError) as error:
        typer.echo(line)
        raise SpeculateError(f"cannot write {out}: {error}") from error


def rounded(value: Any) -> Any:
    """Rounds floats to six significant digits: the rest is noise that makes the line long."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Shows a bar on stderr if that is a terminal; yields the function to call after each step, with its name."""
    steps = TextColumn("{task.description}", style="progress.description", markup=False)
    columns = (steps, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    shown = LiteralConsole(stderr=True)
    with Progress(*columns, console=shown, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=total)
        yield lambda step: bar.update(task, advance=1, description=f"{title}: {step}")
