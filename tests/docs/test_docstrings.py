"""Summary lines of docstrings name their thing: they open with a noun phrase or a verb, not with What, How or Of."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .pages import REPOSITORY


OPENINGS = ("What", "How", "Of", "Which", "As", "From", "That", "Where")
PACKAGES = (
    REPOSITORY / "hf_speculate",
    *(REPOSITORY / "plugins").glob("hf_*"),
    *(REPOSITORY / "training").glob("hf_*"),
)
# Rooms whose docstrings still open so. A room that is done leaves the list; at its end the list goes.
TO_DO = {
    "hf_speculate/cache",
    "hf_speculate/cli",
    "hf_speculate/compatibility.py",
    "hf_speculate/compilation",
    "hf_speculate/custom_generate.py",
    "hf_speculate/drafting",
    "hf_speculate/errors.py",
    "hf_speculate/generation",
    "hf_speculate/gguf",
    "hf_speculate/hub",
    "hf_speculate/options.py",
    "hf_speculate/policy",
    "hf_speculate/registry.py",
    "hf_speculate/round.py",
    "hf_speculate/speculator.py",
    "hf_speculate/target",
    "hf_speculate/tree",
    "hf_speculate/verification",
    "hf_speculate_plugins/block",
    "hf_speculate_plugins/calibration",
    "hf_speculate_plugins/checkpoints",
    "hf_speculate_plugins/combined",
    "hf_speculate_plugins/commands",
    "hf_speculate_plugins/draft_model",
    "hf_speculate_plugins/eagle",
    "hf_speculate_plugins/heads",
    "hf_speculate_plugins/medusa",
    "hf_speculate_plugins/prompt_lookup",
    "hf_speculate_plugins/suffix",
    "hf_speculate_plugins/trees",
    "hf_speculate_training/data",
    "hf_speculate_training/extras.py",
    "hf_speculate_training/fingerprints.py",
    "hf_speculate_training/methods",
    "hf_speculate_training/run",
    "hf_speculate_training/states",
    "hf_speculate_training/target",
}


def room_of(path: Path) -> str:
    """Package and folder, or package and module: "hf_speculate/tree"."""
    package = next(package for package in PACKAGES if path.is_relative_to(package))
    return f"{package.name}/{path.relative_to(package).parts[0]}"


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


def by_room() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            places = [f"{path.relative_to(REPOSITORY)}:{line}" for line in offenders(path.read_text(encoding="utf-8"))]
            if places:
                found.setdefault(room_of(path), []).extend(places)
    return found


def test_summaries_name_their_thing():
    found = by_room()
    wrong = [place for room, places in found.items() if room not in TO_DO for place in places]
    assert not wrong, f"docstrings that open with {', '.join(OPENINGS)}: {', '.join(wrong)}"
    done = TO_DO - found.keys()
    assert not done, f"take them off TO_DO: {', '.join(sorted(done))}"


@pytest.mark.parametrize(
    ("doc", "is_wrong"), [("What it does.", True), ("Of a model.", True), ("Offsets of rows.", False), ("", False)]
)
def test_the_check_can_fail(doc, is_wrong):
    assert bool(offenders(f'def f():\n    """{doc}"""\n')) == is_wrong
