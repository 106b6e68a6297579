"""The pages that people read, taken apart: code blocks with the comment before them, links, code spans, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token


REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
PAGES = [
    README,
    REPOSITORY / "CONTRIBUTING.md",
    *(REPOSITORY / folder / "README.md" for folder in ("plugins", "training", "tests")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]

_COMMENT = re.compile(r"^<!--\s*(.*?)\s*-->\s*$", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        page: where it stands.
        line: of its first line of code, from 1.
        language: what the fence says; "" for indented blocks.
        text: the code.
        note: the HTML comment right before it, "" without one.
    """

    page: Path
    line: int
    language: str
    text: str
    note: str = ""

    @property
    def reason(self) -> str | None:
        """Why the block is not run or checked; None if it is."""
        head, separator, reason = self.note.partition(":")
        return reason.strip() if separator and head == "not run" else None

    @property
    def place(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """As the repository knows it."""
    return str(page.relative_to(REPOSITORY)) if page.is_relative_to(REPOSITORY) else page.name


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page, in order."""
    found, note = [], ""
    for token in _tokens(page):
        if token.type in ("fence", "code_block"):
            line = (token.map or [0])[0] + (2 if token.type == "fence" else 1)
            found.append(Block(page, line, token.info.strip(), token.content, note))
        comment = _COMMENT.match(token.content) if token.type == "html_block" else None
        note = comment.group(1) if comment else ""
    return found


def spans(page: Path) -> list[str]:
    """What stands between backticks in the text."""
    return [token.content for token in _inline(page) if token.type == "code_inline"]


def table(page: Path, *header: str) -> list[list[str]]:
    """Rows of the one table whose header begins with these cells; the header is left out. Cells are Markdown."""
    tables: list[list[list[str]]] = []
    for before, token in pairwise(_tokens(page)):
        if before.type == "table_open":
            tables.append([])
        elif before.type == "tr_open":
            tables[-1].append([])
        if before.type in ("th_open", "td_open"):
            tables[-1][-1].append(token.content)
    (rows,) = (rows for rows in tables if rows[0][: len(header)] == [*header])
    return rows[1:]


def code_in(text: str) -> list[str]:
    """The code spans of a cell or sentence."""
    return re.findall(r"`([^`]+)`", text)


def links(page: Path) -> list[str]:
    """Targets of links and images."""
    targets = [token.attrGet("href") or token.attrGet("src") for token in _inline(page)]
    return [str(target) for target in targets if target]


def _inline(page: Path) -> Iterator[Token]:
    for token in _tokens(page):
        yield from token.children or ()


def _tokens(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))
