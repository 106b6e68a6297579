"""The command `hf-speculate`.

Other packages add sub-commands through the entry-point group `hf_speculate.commands`, and benchmarks through
`hf_speculate.bench_commands`: a `typer.Typer` app, or a function with typer's annotations, imported when asked for.
"""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from .bench import app as bench_app
from .commands import JsonOnly, console, drafter_list, environment
from .errors import SpeculateError


COMMANDS_GROUP = "hf_speculate.commands"
BENCH_COMMANDS_GROUP = "hf_speculate.bench_commands"

_EXAMPLES = """
Examples:

  hf-speculate drafters

  hf-speculate env --json

  hf-speculate bench generate --quick
"""


class _PluginGroup(TyperGroup):
    """Adds the commands of other packages."""

    def list_commands(self, ctx) -> list[str]:
        own = super().list_commands(ctx)
        return own + sorted(name for name in self.installed() if name not in own)

    def get_command(self, ctx, cmd_name: str):
        own = super().get_command(ctx, cmd_name)
        points = self.installed()
        return _load_command(points[cmd_name]) if own is None and cmd_name in points else own

    def installed(self) -> dict[str, EntryPoint]:
        return _installed_commands()


class _BenchGroup(_PluginGroup):
    def installed(self) -> dict[str, EntryPoint]:
        return _installed_commands(BENCH_COMMANDS_GROUP)


class _Group(_PluginGroup):
    """Turns a `SpeculateError` into one line on stderr."""

    def invoke(self, ctx) -> Any:
        try:
            return super().invoke(ctx)
        except SpeculateError as error:
            typer.echo(f"hf-speculate: error: {error}", err=True)
            raise typer.Exit(1) from error


def _installed_commands(group: str = COMMANDS_GROUP) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


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


app = typer.Typer(
    cls=_Group,
    name="hf-speculate",
    help="Speculative decoding for transformers: drafters, benchmarks.",
    epilog=_EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench", cls=_BenchGroup)


@app.command()
def drafters(json_only: JsonOnly = False) -> None:
    """List the installed drafters: name, object, distribution, version."""
    found = drafter_list()
    if json_only:
        typer.echo(json.dumps(found))
        return
    table = Table()
    for column in ("name", "object", "distribution", "version"):
        table.add_column(column, overflow="fold")
    for drafter in found:
        table.add_row(*drafter.values())
    console().print(table)


@app.command()
def env(json_only: JsonOnly = False) -> None:
    """Print versions and hardware: paste this into a bug report."""
    found = environment()
    if json_only:
        typer.echo(json.dumps(found))
        return
    for name, value in (found.pop("versions") | found).items():
        typer.echo(f"- {name}: {', '.join(value) if isinstance(value, list) else value}")
