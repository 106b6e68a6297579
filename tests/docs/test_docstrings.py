"""Docstrings name their thing, and texts use words that a stranger knows.

Summary lines open with a noun phrase or a verb, not with What, How or Of. Descriptions of arguments and attributes do
not open with a bare preposition or pronoun ("rows: that count"). Docstrings, comments, strings and pages do not use the
words in `WORDS`.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from .pages import PAGES, REPOSITORY, name_of


OPENINGS = ("What", "How", "Of", "Which", "As", "From", "That", "Where")
BARE = ("as", "for", "from", "in", "of", "that", "those", "what", "where", "which", "with")
SECTIONS = ("Args:", "Attributes:", "Class attributes:")
LEFT = {"token, commit_message, revision: as everywhere on the Hub."}
"""Descriptions that are still to be reworded."""
WORDS = {
    r"tokens an? (drafted )?(round|second|step|row|draft|forward)|ms an? token|rows a step|forwards? an? round": "per",
    r"(?<!there )\b(?:is|are) no (?!longer|more than|one\b|less than)\w+": "is not a",
    r"\banew": "again",
    r"\bnobody|\bsomebody": "name who does it, or use the passive",
    # Something can be left or lag behind, and lie behind a link.
    r"(?<!left )(?<!lag )(?<!lags )(?<!ones )\bbehind\b(?! (?:a|the|every) link\b)": "after",
    r"(?<![`\"])\bbeside\b(?![`\":]|-others\.md)": "next to, in addition to, with",
    r"\bgo(?:es)? on\b(?! to\b)|\bto go on\b": "continues, resumes",
    r"\bat last with\b": "last error:",
    r"\b(?:this|other|each) rooms?\b": "package",
    r"\bwithout word of\b|\bwhat is got\b|\bis served\b(?! by)": "result, works with",
    r"\b(?:files?|configs?|options|names|keys) sa(?:y|ys)\b|\bsays so\b|\bsays why\b": "states, gives the reason",
}
"""Words that have a plainer one, as patterns, with that one."""
HISTORY = ("docs/log.md", "docs/transformers-tests.md")
"""Pages that keep their words: records of the past, and output of a test."""
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
    paths = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
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
def test_bare_items_finds_arguments_without_a_noun(description, is_wrong):
    doc = f'def f():\n    """Counts.\n\n    Args:\n        {description}\n            of which this goes on.\n    """\n'
    assert bool(bare_items(doc)) == is_wrong


@pytest.mark.parametrize(
    ("doc", "is_wrong"), [("What it does.", True), ("Of a model.", True), ("Offsets of rows.", False), ("", False)]
)
def test_offenders_finds_summaries_that_name_no_thing(doc, is_wrong):
    assert bool(offenders(f'def f():\n    """{doc}"""\n')) == is_wrong


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what people read in a file: strings and runs of comments of a module, paragraphs of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from paragraphs(text)
        return
    comments: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            if comments and line != last + 1:
                yield last, " ".join(comments)
                comments = []
            comments.append(token.string.lstrip("# "))
            last = line
        elif token.type in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)):
            yield line, token.string
    if comments:
        yield last, " ".join(comments)


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    line = 1
    for paragraph in text.split("\n\n"):
        yield line, paragraph
        line += paragraph.count("\n") + 2


def odd_words(text: str) -> list[str]:
    """The phrases in a text that `WORDS` has, each with the plainer one."""
    flat = " ".join(text.split())
    return [
        f"{found[0]!r} -> {better}" for pattern, better in WORDS.items() for found in re.finditer(pattern, flat, re.I)
    ]


def test_words_are_plain():
    paths = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))] + PAGES
    wrong = [
        f"{name_of(path)}:{line}: {phrase}"
        for path in paths
        if not name_of(path).startswith(HISTORY)
        for line, text in prose(path)
        for phrase in odd_words(text)
    ]
    assert len(paths) > 300
    assert not wrong, "words with a plainer one:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("2.1 tokens a round", True),
        ("2.1 tokens per round", False),
        ("the file\n    is no picture", True),
        ("it is no longer needed, and there is no file", False),
        ("the token behind the root", True),
        ("the bias behind a token", True),
        ("recurrent states lag behind", False),
        ("the head beside it", True),
        ("the parameter `beside`", False),
    ],
)
def test_odd_words_finds_phrases_with_a_plainer_one(text, is_wrong):
    assert bool(odd_words(text)) == is_wrong
