"""The application: its commands, and those of other packages."""

from __future__ import annotations

from typing import Annotated

import typer

from ..bench import app as bench_app
from ..commands import command_of, say
from ..overview import version_line
from .commands import (
    CHAT_EXAMPLES,
    DOCTOR_EXAMPLES,
    DRAFTERS_EXAMPLES,
    ENV_EXAMPLES,
    GENERATE_EXAMPLES,
    SERVE_EXAMPLES,
    chat,
    doctor,
    drafters,
    env,
    generate,
    serve,
)
from .groups import Application, LiteralGroup, MainGroup
from .options import ChatOptions, GenerateOptions, ServeOptions


app = Application(
    cls=MainGroup,
    name="hf-speculate",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench_app, name="bench", cls=LiteralGroup)
app.command(epilog=GENERATE_EXAMPLES)(command_of(GenerateOptions, generate))
app.command(epilog=CHAT_EXAMPLES)(command_of(ChatOptions, chat))
app.command(epilog=SERVE_EXAMPLES)(command_of(ServeOptions, serve))
app.command(epilog=DOCTOR_EXAMPLES)(doctor)
app.command(epilog=DRAFTERS_EXAMPLES)(drafters)
app.command(epilog=ENV_EXAMPLES)(env)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        say(version_line().removesuffix("\n"))
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
