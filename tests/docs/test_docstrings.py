"""Summary lines of docstrings name their thing: they open with a noun phrase or a verb, not with What, How or Of."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .pages import REPOSITORY


OPENINGS = ("What", "How", "Of", "Which", "As", "From", "That", "Where")
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


@pytest.mark.parametrize(
    ("doc", "is_wrong"), [("What it does.", True), ("Of a model.", True), ("Offsets of rows.", False), ("", False)]
)
def test_the_check_can_fail(doc, is_wrong):
    assert bool(offenders(f'def f():\n    """{doc}"""\n')) == is_wrong
