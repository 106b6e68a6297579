"""Groups of commands to which other packages add theirs."""

from __future__ import annotations

import errno
import io
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import SpeculateError, first_line


COMMANDS_GROUP = "hf_speculate.commands"
BENCH_COMMANDS_GROUP = "hf_speculate.bench_commands"

INTERRUPTED = 130  # the status that shells give to what Ctrl-C ended


class PluginGroup(TyperGroup):
    """Adds the commands of other packages."""

    entry_point_group = COMMANDS_GROUP

    def list_commands(self, ctx) -> list[str]:
        own = super().list_commands(ctx)
        return own + sorted(name for name in self.installed() if name not in own)

    def get_command(self, ctx, cmd_name: str):
        own = super().get_command(ctx, cmd_name)
        points = self.installed()
        return _load_command(points[cmd_name]) if own is None and cmd_name in points else own

    def installed(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.entry_point_group)}


class BenchGroup(PluginGroup):
    """Of `hf-speculate bench`."""

    entry_point_group = BENCH_COMMANDS_GROUP


class MainGroup(PluginGroup):
    """Ends every command in order: what goes wrong is one line on stderr and a status."""

    def invoke(self, ctx) -> Any:
        _take_any_text()
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a full disk may show only now
            return result
        except SpeculateError as error:
            raise _end(f"error: {error}", error.exit_code) from error
        except KeyboardInterrupt as error:
            raise _interrupted() from error
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # nobody reads on: typer ends without a word
            place = "" if error.filename or not _has_lost_stdout() else "cannot write to stdout: "
            raise _end(f"error: {place}{first_line(error)}", 1) from error


class Application(typer.Typer):
    """The command as a whole: Ctrl-C is one line, also before the first of its own lines runs and after the last."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except KeyboardInterrupt:
            raise SystemExit(_interrupted().exit_code) from None


def _interrupted() -> typer.Exit:
    if sys.stderr.isatty():
        typer.echo(err=True)  # ends the line that shows ^C
    return _end("interrupted.", INTERRUPTED)


def _end(message: str, status: int) -> typer.Exit:
    typer.echo(f"hf-speculate: {message}", err=True)
    return typer.Exit(status)


def _take_any_text() -> None:
    """Bytes of stdin that are not UTF-8 come as surrogates, see `readable`; stdout shows "?" for what it lacks."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _has_lost_stdout() -> bool:
    """Whether what was printed cannot be written. Then it goes nowhere, or Python would try, and fail, at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _load_command(point: EntryPoint):
    """The command; one that cannot be imported stays in the list and says why when it is called."""
    try:
        loaded = point.load()
    except Exception as error:
        problem = f"command {point.name!r} ({point.value}) cannot be imported: {type(error).__name__}: {error}"

        def loaded() -> None:
            raise SpeculateError(problem)

        loaded.__doc__ = f"(broken) {problem}"
    if not isinstance(loaded, typer.Typer):
        function, loaded = loaded, typer.Typer(add_completion=False)
        loaded.command(point.name)(function)
    command = typer.main.get_command(loaded)
    command.name = point.name
    return command
