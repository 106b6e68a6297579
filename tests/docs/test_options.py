"""Every option and every command has a place in the pages: what no page names, no user finds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import typer

from hf_speculate.speculator import EngineOptions
from hf_speculate.speculator.registry import load_drafter
from hf_speculate_tools.cli import app

from .facts import built_in_drafters
from .pages import PAGES, REPOSITORY, blocks, spans


_STORY = REPOSITORY / "docs" / "log.md"
CODE = "\n".join(
    text for page in PAGES if page != _STORY for text in (*spans(page), *(block.text for block in blocks(page)))
)


def unnamed(names: list[str]) -> list[str]:
    """Names that stand in no code of any page."""
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", CODE)]


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Sub-commands as users type them: "bench generate"."""
    if not hasattr(command, "list_commands"):
        yield " ".join(path)
        return
    context = command.context_class(command)
    for name in command.list_commands(context):
        yield from commands(command.get_command(context, name), (*path, name))


def test_pages_name_every_engine_option():
    assert not unnamed([each.name for each in fields(EngineOptions)])


@pytest.mark.parametrize("drafter", built_in_drafters())
def test_pages_name_every_drafter_option(drafter):
    kinds = load_drafter(drafter).options_classes
    assert not unnamed([each.name for kind in kinds for each in fields(kind) if each.init])


def test_pages_name_every_command():
    names = list(commands(typer.main.get_command(app)))
    assert "bench generate" in names
    assert not [name for name in names if not re.search(rf"(hf-speculate |^){name}\b", CODE, re.MULTILINE)]
