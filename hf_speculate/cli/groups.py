"""Groups of commands to which other packages add theirs."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import SpeculateError


COMMANDS_GROUP = "hf_speculate.commands"
BENCH_COMMANDS_GROUP = "hf_speculate.bench_commands"


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
    """Turns a `SpeculateError` into one line on stderr."""

    def invoke(self, ctx) -> Any:
        try:
            return super().invoke(ctx)
        except SpeculateError as error:
            typer.echo(f"hf-speculate: error: {error}", err=True)
            raise typer.Exit(1) from error


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
