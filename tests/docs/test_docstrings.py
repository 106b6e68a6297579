"""Docstrings name their thing.

Summary lines open with a noun phrase or a verb, not with What, How or Of. Descriptions of arguments and attributes do
not open with a bare preposition or pronoun ("rows: that count").
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from .pages import REPOSITORY


OPENINGS = ("What", "How", "Of", "Which", "As", "From", "That", "Where")
BARE = ("as", "for", "from", "in", "of", "that", "those", "what", "where", "which", "with")
SECTIONS = ("Args:", "Attributes:", "Class attributes:")
LEFT = {"token, commit_message, revision: as everywhere on the Hub."}
"""Descriptions that are still to be reworded."""
PACKAGES = (
    REPOSITORY / "hf_speculate",
    *(REPOSITORY / "plugins").glob("hf_*"),
    *(REPOSITORY / "training").glob("hf_*"),
)


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, docstring) of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def offenders(text: str) -> list[int]:
    """Lines of docstrings that open with one of `OPENINGS`."""
    return [line for line, doc in documented(ast.parse(text)) if doc.split(maxsplit=1)[0] in OPENINGS]


def test_summaries_name_their_thing():
    paths = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    found = {path: offenders(path.read_text(encoding="utf-8")) for path in paths}
    wrong = [f"{path.relative_to(REPOSITORY)}:{line}" for path, lines in found.items() for line in lines]
    assert len(paths) > 100
    assert not wrong, f"docstrings that open with {', '.join(OPENINGS)}: {', '.join(wrong)}"


def items(doc: str) -> Iterator[tuple[str, str]]:
    """(line, description) of the arguments and attributes in a docstring, without continuation lines."""
    section = ""
    for line in doc.splitlines():
        if line and not line.startswith(" "):
            section = line
        found = re.match(r" {4}[\w`][\w`., *]*: (.+)", line)
        if found and section in SECTIONS:
            yield line.strip(), found[1]


def bare_items(text: str) -> list[tuple[int, str]]:
    """(line of the docstring, its line) of descriptions that open with one of `BARE`."""
    return [
        (number, line)
        for number, doc in documented(ast.parse(text))
        for line, description in items(doc)
        if description.split(maxsplit=1)[0].lower() in BARE and line not in LEFT
    ]


def test_arguments_have_a_noun():
    paths = sorted((REPOSITORY / "hf_speculate").rglob("*.py"))
    found = {path: bare_items(path.read_text(encoding="utf-8")) for path in paths}
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line}" for path, lines in found.items() for number, line in lines
    ]
    assert len(paths) > 100
    assert not wrong, "arguments without a noun:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("description", "is_wrong"),
    [
        ("rows: that count.", True),
        ("size, count: of the rows.", True),
        ("rows: rows that count.", False),
        ("offset: offset of a row, in bytes.", False),
    ],
)
def test_the_check_of_arguments_can_fail(description, is_wrong):
    doc = f'def f():\n    """Counts.\n\n    Args:\n        {description}\n            of which this goes on.\n    """\n'
    assert bool(bare_items(doc)) == is_wrong


@pytest.mark.parametrize(
    ("doc", "is_wrong"), [("What it does.", True), ("Of a model.", True), ("Offsets of rows.", False), ("", False)]
)
def test_the_check_can_fail(doc, is_wrong):
    assert bool(offenders(f'def f():\n    """{doc}"""\n')) == is_wrong
