"""Texts on the terminal while they are written: one, or several side by side, with their drafts marked if asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console  # noqa: TID251  (of the caller)
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase, TextStreamer
from transformers.generation.streamers import BaseStreamer

from hf_speculate.messages import printable
from hf_speculate.tree import Round


DRAFTED = "black on green"  # style of tokens that were accepted drafts


class Typist(TextStreamer):
    """A streamer that passes a text on piece by piece, and keeps its tokens and its time.

    Attributes:
        tokens: tokens so far, without the prompt.
        start: time at which the call began. Make the object right before the call, or set this.
        seconds: seconds from `start` to the last token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], Any]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]
        self._write = write
        self.tokens: list[int] = []
        self.start = time.perf_counter()
        self.seconds = 0.0

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.tokens += value.flatten().tolist()
            self.seconds = time.perf_counter() - self.start
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)

    @property
    def text(self) -> str:
        return str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))

    def shown(self, style: str) -> Text:
        """The text so far in a style, control characters made visible."""
        return Text(printable(self.text), style=style)

    @property
    def speed(self) -> str:
        """Line with tokens and tokens per second, the prompt's time included."""
        count = len(self.tokens)
        return f"{count} tokens, {count / self.seconds:.1f} tokens/s" if self.seconds else "no tokens"


class DraftTypist(Typist):
    """A typist that knows which tokens were accepted drafts. The text comes token by token, not word by word.

    Attributes:
        num_drafted: number of tokens that were accepted drafts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str, bool], Any]):
        super().__init__(tokenizer, lambda _: None)
        self._write_piece = write
        self._pieces: list[tuple[str, bool]] = []
        self._line: list[int] = []  # tokens of the last line, which alone are decoded again
        self._line_text = ""
        self.num_drafted = 0

    def add(self, round: Round) -> None:
        """Adds the tokens of a round of one row."""
        for index, token in enumerate(round.tokens[0]):
            is_drafted = index < round.num_accepted[0]
            self.tokens.append(token)
            self._line.append(token)
            self.num_drafted += is_drafted
            text = str(self.tokenizer.decode(self._line, skip_special_tokens=True))
            if not text.endswith("\ufffd"):  # a part of a character waits for the rest
                self._pass_on(text, is_drafted)
        self.seconds = time.perf_counter() - self.start

    def end(self) -> None:
        super().end()
        self._pass_on(str(self.tokenizer.decode(self._line, skip_special_tokens=True)), False)

    def _pass_on(self, text: str, is_drafted: bool) -> None:
        """Passes on what is new in the text of the last line."""
        if piece := text[len(self._line_text) :]:
            self._pieces.append((piece, is_drafted))
            self._write_piece(piece, is_drafted)
        self._line, self._line_text = ([], "") if text.endswith("\n") else (self._line, text)

    def shown(self, style: str) -> Text:
        if not self.num_drafted:
            return super().shown(style)
        pieces = ((printable(piece), DRAFTED if is_drafted else style) for piece, is_drafted in self._pieces)
        return Text.assemble(*pieces)

    @property
    def speed(self) -> str:
        return f"{super().speed}, {self.num_drafted} drafted" if self.num_drafted else super().speed


class _Panel(BaseStreamer):
    """One of several texts side by side."""

    def __init__(self, title: str, style: str, typist: DraftTypist, show: Callable[[], None]):
        self.title, self.style, self.typist, self._show = title, style, typist, show

    def put(self, value: torch.Tensor) -> None:
        self.typist.put(value)
        self._show()

    def add(self, round: Round) -> None:
        self.typist.add(round)
        self._show()

    def end(self) -> None:
        self.typist.end()
        self._show()

    def panel(self) -> Panel:
        return Panel(self.typist.shown(self.style), title=self.title, subtitle=self.typist.speed)


_WIDEST = 160  # columns; a console without a terminal has more


def side_by_side(
    console: Console, tokenizer: PreTrainedTokenizerBase, runs: Sequence[tuple[str, str, Callable[[Any], Any]]]
) -> list[DraftTypist]:
    """Generates texts one after the other, and shows them side by side while they are written.

    Args:
        runs: title, style and generating function of each text. The function is called with a streamer, which also has
            `DraftTypist.add`.
    Returns:
        The texts with their times.
    """

    def screen() -> Table:
        grid = Table.grid(padding=(0, 1))
        for _ in panels:  # panels of equal width, even if the terminal's width is not divisible
            grid.add_column(width=(min(console.width, _WIDEST) + 1) // len(panels) - 1)
        grid.add_row(*(panel.panel() for panel in panels))
        return grid

    def show() -> None:
        live.update(screen(), refresh=live.console.is_terminal)

    panels: list[_Panel] = []
    with Live(console=console, auto_refresh=False) as live:
        panels += [_Panel(title, style, DraftTypist(tokenizer, lambda *_: None), show) for title, style, _ in runs]
        for panel, (_, _, run) in zip(panels, runs, strict=True):
            panel.typist.start = time.perf_counter()
            run(panel)
    if not console.is_terminal:
        console.line()  # `Live` ends no line there
    return [panel.typist for panel in panels]
