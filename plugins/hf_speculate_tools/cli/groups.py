"""Groups of commands: commands of other packages, errors in one line, help as plain text."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from hf_speculate.errors import SpeculateError, first_line
from hf_speculate.messages import message, printable

from ..commands import say
from ..endings import INTERRUPTED, MISUSED, drop_stdout
from ..overview import COMMANDS_GROUP, overview


class LiteralGroup(TyperGroup):
    """Shows help as plain text: without markup, and without columns that cut off names."""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        _make_plain(self)

    def get_command(self, ctx, cmd_name: str):
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _make_plain(command)
        return command

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        if not args and self.no_args_is_help:
            say(ctx.get_help())
            raise typer.Exit(MISUSED)
        return super().parse_args(ctx, args)


class MainGroup(LiteralGroup):
    """Adds the commands of other packages, and ends every command in order: an error is one line and a status."""

    def list_commands(self, ctx) -> list[str]:
        own = super().list_commands(ctx)
        return own + sorted(name for name in self.installed() if name not in own)

    def get_command(self, ctx, cmd_name: str):
        points = self.installed()
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in points:
            return own
        command = _load_command(points[cmd_name])
        _make_plain(command)
        return command

    def get_help(self, ctx) -> str:
        return overview(self.installed().values()).removesuffix("\n")  # typer ends the line

    def installed(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=COMMANDS_GROUP)}

    def make_context(self, info_name, args, parent=None, **extra: Any):
        with _reporting_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx) -> Any:
        _take_any_text()
        try:
            with _reporting_errors():
                result = super().invoke(ctx)
            sys.stdout.flush()  # a full disk may show only now
            return result
        except SpeculateError as error:
            raise _end(f"error: {error}", error.exit_code) from error
        except KeyboardInterrupt as error:
            raise _interrupted() from error
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader has gone: typer ends without a message
            place = "" if error.filename or not _has_lost_stdout() else "cannot write to stdout: "
            raise _end(f"error: {place}{first_line(error)}", 1) from error


class Application(typer.Typer):
    """The command as a whole. Ctrl-C prints one line, also before its first line runs and after its last."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except KeyboardInterrupt:
            raise SystemExit(_interrupted().exit_code) from None


def _interrupted() -> typer.Exit:
    if sys.stderr.isatty():
        say("", err=True)  # ends the line that shows ^C
    return _end("interrupted.", INTERRUPTED)


def _end(told: str, status: int) -> typer.Exit:
    say(f"hf-speculate: {told}", err=True)
    return typer.Exit(status)


def _take_any_text() -> None:
    """Reads bytes of stdin that are not UTF-8 as surrogates (`readable`). stdout prints "?" for characters that it
    lacks."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _has_lost_stdout() -> bool:
    """Whether stdout cannot be written. Its text is then dropped."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_stdout()
        return True
    return False


def _load_command(point: EntryPoint):
    """The command of an entry point. One that cannot be imported stays in the list; a call gives the reason."""
    try:
        loaded = point.load()
    except Exception as error:
        if isinstance(error, SpeculateError):  # its text names what is missing
            problem = about = str(error)
        else:
            problem = f"command {point.name!r} ({point.value}) cannot be imported: {type(error).__name__}: {error}"
            about = f"(broken) {problem}"
        loaded = _stub(point.name, problem, about)
    if not isinstance(loaded, typer.Typer):
        function, loaded = loaded, typer.Typer(add_completion=False)
        loaded.command(point.name)(function)
    command = typer.main.get_command(loaded)
    command.name = point.name
    return command


def _stub(name: str, problem: str, about: str) -> typer.Typer:
    """A command that takes any options and fails with `problem`; `about` is its line in the list of commands."""
    stub = typer.Typer(add_completion=False)

    @stub.command(name, help=about, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def fail() -> None:
        raise SpeculateError(problem)

    return stub


def _make_plain(command: Any) -> None:
    """Shows the help of a command and of its sub-commands without rich, and control characters in it as text."""
    command.rich_markup_mode = None
    for owner in (command, *command.params):
        for name in ("help", "short_help", "epilog"):
            if text := getattr(owner, name, None):
                setattr(owner, name, _printable_lines(text))
    for other in getattr(command, "commands", {}).values():
        _make_plain(other)


def _printable_lines(text: str) -> str:
    """Keeps lines of a single backspace: click's sign that it must not wrap the lines below."""
    return "\n".join(line if line == "\b" else printable(line) for line in text.split("\n"))


@contextmanager
def _reporting_errors() -> Iterator[None]:
    """Masks secrets and shows control characters in errors that quote the command line."""
    try:
        yield
    except Exception as error:
        if isinstance(text := getattr(error, "message", None), str):
            error.message = message(text)  # type: ignore[attr-defined]
        raise
