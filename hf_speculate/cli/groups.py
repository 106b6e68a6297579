"""Groups of commands to which other packages add theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from ..commands import say
from ..errors import SpeculateError
from ..messages import message, printable


COMMANDS_GROUP = "hf_speculate.commands"
BENCH_COMMANDS_GROUP = "hf_speculate.bench_commands"


class PluginGroup(TyperGroup):
    """Adds the commands of other packages. Help texts are shown as they are written: rich reads no markup in them."""

    entry_point_group = COMMANDS_GROUP

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        _escape_help(self)

    def list_commands(self, ctx) -> list[str]:
        own = super().list_commands(ctx)
        return own + sorted(name for name in self.installed() if name not in own)

    def get_command(self, ctx, cmd_name: str):
        own = super().get_command(ctx, cmd_name)
        points = self.installed()
        found = _load_command(points[cmd_name]) if own is None and cmd_name in points else own
        if found is not None:
            _escape_help(found)
        return found

    def installed(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.entry_point_group)}


class BenchGroup(PluginGroup):
    """Of `hf-speculate bench`."""

    entry_point_group = BENCH_COMMANDS_GROUP


class MainGroup(PluginGroup):
    """Turns a `SpeculateError` into one line on stderr."""

    def make_context(self, info_name, args, parent=None, **extra: Any):
        with _shown_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx) -> Any:
        try:
            with _shown_errors():
                return super().invoke(ctx)
        except SpeculateError as error:
            say(f"hf-speculate: error: {error}", err=True)
            raise typer.Exit(1) from error


def _load_command(point: EntryPoint):
    """The command; one that cannot be imported stays in the list and says why, whatever it is called with."""
    try:
        loaded = point.load()
    except Exception as error:
        if isinstance(error, SpeculateError):  # it says itself what is missing
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
    """A command that takes any options and says what is wrong.

    Args:
        name: of the command.
        problem: the error when it is called.
        about: its line in the list of commands.
    """
    stub = typer.Typer(add_completion=False)

    @stub.command(name, help=about, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def fail() -> None:
        raise SpeculateError(problem)

    return stub


def _escape_help(command: Any) -> None:
    """Escapes the texts of a command and its parameters, once: the same command is asked for more than once."""
    if getattr(command, "help_is_escaped", False):
        return
    command.help_is_escaped = True
    for owner in (command, *command.params):
        for name in ("help", "short_help", "epilog"):
            if text := getattr(owner, name, None):
                setattr(owner, name, escape(printable(text)))


@contextmanager
def _shown_errors() -> Iterator[None]:
    """Errors about a command line quote it: secrets are masked, and control characters shown as such."""
    try:
        yield
    except Exception as error:
        if isinstance(text := getattr(error, "message", None), str):
            error.message = message(text)  # type: ignore[attr-defined]
        raise
