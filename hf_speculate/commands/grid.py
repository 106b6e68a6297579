"""Tables for the terminal and for Markdown, from the same cells."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table before it is drawn.

    Attributes:
        columns: headers; a line break in them is one on the terminal and a space in Markdown.
        rows: cells, one a column.
        words: columns that hold words (aligned left); the others hold figures.
        breaks: rows before which the terminal gets a line.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[str] = ()
    caption: str = ""
    breaks: Collection[int] = ()

    def rich(self) -> Table:
        """For a terminal."""
        table = Table(title=self.title, title_justify="left", caption=self.caption or None, caption_justify="left")
        for column in self.columns:
            is_words = column in self.words
            table.add_column(column, justify="left" if is_words else "right", overflow="fold")
        for index, row in enumerate(self.rows):
            if index in self.breaks:
                table.add_section()
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """For a README: the title in bold, the table, the caption below."""
        rule = ["---" if column in self.words else "---:" for column in self.columns]
        lines = [[column.replace("\n", " ") for column in self.columns], rule, *self.rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return "\n\n".join(filter(None, (f"**{self.title}**", table, self.caption)))


def group_breaks(keys: Sequence[object]) -> list[int]:
    """Indices at which a new group of equal keys begins, the first left out."""
    return [index for index in range(1, len(keys)) if keys[index] != keys[index - 1]]


def ratio(value: float | None) -> str:
    """`1.23x`, or nothing."""
    return "" if value is None else f"{value:.2f}x"


def number(value: float | None, form: str) -> str:
    """A formatted number, or nothing."""
    return "" if value is None else format(value, form)


def by_depth(rates: dict[int, float]) -> str:
    """Acceptance rates as `1:0.70 2:0.45`."""
    return " ".join(f"{depth}:{rate:.2f}" for depth, rate in rates.items()) or "no drafts"
