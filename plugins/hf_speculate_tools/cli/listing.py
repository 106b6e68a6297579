"""Tables of the installed drafters, and of the options of one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from rich.table import Table

from hf_speculate.errors import first_line
from hf_speculate.speculator import EngineOptions, load_drafter

from ..commands import console, drafter_list, say, say_json


# A docstring's list of attributes: names at its first indentation, text up to the next such line.
_ATTRIBUTES = re.compile(r"^Attributes:\n((?:    .*\n?|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w[\w, ]*): (.*(?:\n     +.*)*)", re.MULTILINE)


def list_drafters(json_only: bool) -> None:
    """Prints the list of installed drafters."""
    drafters = drafter_list()
    if json_only:
        say_json(drafters)
        return
    about = (
        {"name": drafter["name"], "drafts": _about(drafter["name"]), "from": drafter["distribution"]}
        for drafter in drafters
    )
    console().print(_table("", ("name", "what it does", "package"), about))
    say("hf-speculate drafters NAME lists the options of one.")


def _about(name: str) -> str:
    """First sentence about a drafter; the error of one that cannot be imported."""
    try:
        return (inspect.getdoc(load_drafter(name)) or "").partition("\n\n")[0].partition(";")[0].rstrip(".")
    except Exception as error:
        return f"(broken) {first_line(error)}"


def describe_drafter(name: str, json_only: bool) -> None:
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
    section = _ATTRIBUTES.search(doc)
    entries = _ENTRY.findall(section.group(1)) if section else []
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}
