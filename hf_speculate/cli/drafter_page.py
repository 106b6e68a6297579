"""`hf-speculate drafters NAME`: what a drafter is, and its options."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, Field, fields
from typing import Any

from rich.table import Table

from ..commands import console, say, say_json
from ..options import EngineOptions
from ..registry import load_drafter


# Of a docstring's list of attributes: names at its first indentation, text up to the next such line.
_ATTRIBUTES = re.compile(r"^Attributes:\n((?:    .*\n?|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w[\w, ]*): (.*(?:\n     +.*)*)", re.MULTILINE)


def drafter_page(name: str, json_only: bool) -> None:
    """Prints what a drafter is and its options; raises `DrafterNotFoundError`."""
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
        table = Table(title=title, title_justify="left")
        for column in ("option", "default", "meaning"):
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row.values())
        console().print(table)


def _options(kind: type[Any]) -> list[dict[str, str]]:
    """Fields of a dataclass with their defaults and what its docstring says of them."""
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
