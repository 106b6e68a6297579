"""Tables for the terminal and for Markdown, from the same cells."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table before it is drawn.

    Attributes:
        title: line above the table.
        columns: headers; a line break in them is one on the terminal and a space in Markdown.
        rows: cells, one for each column.
        words: columns that hold words (aligned left); the others hold figures.
        caption: line below the table.
        breaks: indices of rows above which the terminal shows a line.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[str] = ()
    caption: str = ""
    breaks: Collection[int] = ()

    @classmethod
    def of(
        cls,
        title: str,
        rows: Sequence[Mapping[str, Any]],
        columns: Mapping[str, str | Callable[[Any], str]],
        *,
        groups: Sequence[str] = (),
        caption: str = "",
    ) -> Grid:
        """Makes a grid with one line for each row of a result.

        Args:
            title: line above the table.
            rows: rows of the result.
            columns: header -> format of a row's values, as `{speedup[eager]:.2f}x`, or a function of the row. A cell is
                empty where a value is absent or None; a column that no row fills is left out. A format without a
                format specification (`{method}`) makes a column of words.
            groups: keys of a row; where one of them changes, the terminal shows a line.
            caption: line below the table.
        """
        cells = {header: [_cell(form, row) for row in rows] for header, form in columns.items()}
        filled = [header for header, column in cells.items() if any(column)]
        keys = [[row[key] for key in groups] for row in rows]
        return cls(
            title=title,
            columns=filled,
            rows=list(zip(*(cells[header] for header in filled), strict=True)),
            words={header for header in filled if isinstance(form := columns[header], str) and ":" not in form},
            caption=caption,
            breaks=[index for index in range(1, len(keys)) if keys[index] != keys[index - 1]],
        )

    def rich(self, *, is_narrow: bool = False) -> Table:
        """Table for a terminal; a narrow one gets fewer lines and spaces. Cells are broken in columns of words only."""
        table = Table(title=self.title, title_justify="left", caption=self.caption or None, caption_justify="left")
        if is_narrow:
            table.box, table.show_edge, table.padding = box.SIMPLE_HEAD, False, 0
        for index, column in enumerate(self.columns):
            is_words = column in self.words
            longest = max((len(row[index]) for row in self.rows), default=0)
            width = None if is_words else max(longest, *map(len, column.splitlines()))
            table.add_column(column, justify="left" if is_words else "right", overflow="fold", min_width=width)
        for index, row in enumerate(self.rows):
            if index in self.breaks:
                table.add_section()
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Text for a page: the title in bold, the table, the caption below."""
        rule = ["---" if column in self.words else "---:" for column in self.columns]
        lines = [[column.replace("\n", " ") for column in self.columns], rule, *self.rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return "\n\n".join(filter(None, (f"**{self.title}**", table, self.caption)))


def by_depth(rates: Mapping[int, float]) -> str:
    """Acceptance rates as `1:0.70 2:0.45`, down to the first depth at which nothing was accepted."""
    last = next((depth for depth, rate in rates.items() if not rate), max(rates, default=0))
    return " ".join(f"{depth}:{rate:.2f}" for depth, rate in rates.items() if depth <= last) or "no drafts"


def _cell(form: str | Callable[[Any], str], row: Mapping[str, Any]) -> str:
    try:
        return form.format(**row) if isinstance(form, str) else form(row)
    except (KeyError, TypeError):  # absent, or None
        return ""
