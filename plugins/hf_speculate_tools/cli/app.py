"""The application, and its small commands: `drafters` and `env`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer
from rich.table import Table

from hf_speculate.errors import first_line
from hf_speculate.speculator import EngineOptions, load_drafter

from ..bench import app as bench_app
from ..commands import JsonOnly, command_of, console, drafter_list, environment, say, say_json
from ..overview import version_line
from .chat import CHAT_EXAMPLES, ChatOptions, chat
from .doctor import DOCTOR_EXAMPLES, doctor
from .generate import GENERATE_EXAMPLES, GenerateOptions, generate
from .groups import Application, LiteralGroup, MainGroup


# A docstring's list of attributes: names at its first indentation, text up to the next such line.
_ATTRIBUTES = re.compile(r"^Attributes:\n((?:    .*\n?|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w[\w, ]*): (.*(?:\n     +.*)*)", re.MULTILINE)


_DRAFTERS_EXAMPLES = """
\b
Examples:
  hf-speculate drafters
  hf-speculate drafters eagle
"""

_ENV_EXAMPLES = """
\b
Examples:
  hf-speculate env --json
"""

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
app.command(epilog=DOCTOR_EXAMPLES)(doctor)


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


@app.command(epilog=_DRAFTERS_EXAMPLES)
def drafters(
    name: Annotated[
        str | None, typer.Argument(help="Show the options of this drafter (default: list all drafters).")
    ] = None,
    json_only: JsonOnly = False,
) -> None:
    """List the installed drafters, or show the options of one."""
    if name is not None:
        _drafter_page(name, json_only)
        return
    found = drafter_list()
    if json_only:
        say_json(found)
        return
    about = ({"name": each["name"], "drafts": _about(each["name"]), "from": each["distribution"]} for each in found)
    console().print(_table("", ("name", "what it does", "package"), about))
    say("hf-speculate drafters NAME lists the options of one.")


@app.command(epilog=_ENV_EXAMPLES)
def env(json_only: JsonOnly = False) -> None:
    """Print versions and hardware for a bug report."""
    found = environment()
    if json_only:
        say_json(found)
        return
    for name, value in (found.pop("versions") | found).items():
        say(f"- {name}: {', '.join(value) if isinstance(value, list) else value}")


def _about(name: str) -> str:
    """First sentence about a drafter; the error of one that cannot be imported."""
    try:
        return (inspect.getdoc(load_drafter(name)) or "").partition("\n\n")[0].partition(";")[0].rstrip(".")
    except Exception as error:
        return f"(broken) {first_line(error)}"


def _drafter_page(name: str, json_only: bool) -> None:
    """Prints the description of a drafter and its options; raises `DrafterNotFoundError`."""
    drafter = load_drafter(name)
    about = (inspect.getdoc(drafter) or "").partition("\n\n")[0]
    source = (inspect.getdoc(drafter.for_target) or "").partition("\n\n")[0]
    tables = {
        "options": [row for kind in drafter.options_classes for row in _options(kind)],
        "engine options": _options(EngineOptions),
    }
    if json_only:
        say_json({"name": name, "about": about, "needs": source, **tables})
        return
    say(f"{name}: {about}\n{source}\n")
    for title, rows in tables.items():
        console().print(_table(title, ("option", "default", "meaning"), rows))


def _table(title: str, columns: Sequence[str], rows: Iterable[dict[str, str]]) -> Table:
    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def _options(kind: type[Any]) -> list[dict[str, str]]:
    """Fields of a dataclass with their defaults and their meanings, from its docstring."""
    meanings = _meanings(inspect.getdoc(kind) or "")
    return [
        {"option": field.name, "default": _default(field), "meaning": meanings.get(field.name, "")}
        for field in fields(kind)
        if field.init
    ]


def _default(field: Field) -> str:
    if field.default is not MISSING:
        return str(field.default)
    return "" if field.default_factory is MISSING else str(field.default_factory())


def _meanings(doc: str) -> dict[str, str]:
    found = _ATTRIBUTES.search(doc)
    entries = _ENTRY.findall(found.group(1)) if found else []
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
