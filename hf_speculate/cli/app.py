"""The application: its own commands, and what every one has in common."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from .. import __version__
from ..bench import app as bench_app
from ..commands import JsonOnly, console, drafter_list, environment, say, say_json
from .chat import CHAT_EXAMPLES, chat
from .doctor import DOCTOR_EXAMPLES, doctor
from .drafter_page import drafter_page
from .generate import GENERATE_EXAMPLES, generate
from .groups import Application, BenchGroup, MainGroup


_EXAMPLES = """
Examples:

  hf-speculate chat

  hf-speculate generate "Why is the sky blue?" --target ./model --speculator ./head --compare

  hf-speculate drafters prompt_lookup

  hf-speculate train --help

  hf-speculate bench generate --quick
"""

_DRAFTERS_EXAMPLES = """
Examples:

  hf-speculate drafters

  hf-speculate drafters eagle
"""

_ENV_EXAMPLES = """
Examples:

  hf-speculate env --json
"""

app = Application(
    cls=MainGroup,
    name="hf-speculate",
    help="Speculative decoding for transformers: text, heads, benchmarks.",
    epilog=_EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app, name="bench", cls=BenchGroup)
app.command(epilog=GENERATE_EXAMPLES)(generate)
app.command(epilog=CHAT_EXAMPLES)(chat)
app.command(epilog=DOCTOR_EXAMPLES)(doctor)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        say(f"hf-speculate {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(epilog=_DRAFTERS_EXAMPLES)
def drafters(
    name: Annotated[str | None, typer.Argument(help="Show the options of this one.")] = None,
    json_only: JsonOnly = False,
) -> None:
    """List the installed drafters, or show the options of one."""
    if name is not None:
        drafter_page(name, json_only)
        return
    found = drafter_list()
    if json_only:
        say_json(found)
        return
    table = Table()
    for column in ("name", "object", "distribution", "version"):
        table.add_column(column, overflow="fold")
    for drafter in found:
        table.add_row(*drafter.values())
    console().print(table)


@app.command(epilog=_ENV_EXAMPLES)
def env(json_only: JsonOnly = False) -> None:
    """Print versions and hardware: paste this into a bug report."""
    found = environment()
    if json_only:
        say_json(found)
        return
    for name, value in (found.pop("versions") | found).items():
        say(f"- {name}: {', '.join(value) if isinstance(value, list) else value}")
