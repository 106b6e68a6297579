"""JSON as it is written, piece by piece: the place in the object, its keys and values, and its whitespace.

Nothing is read twice. Text outside of any object costs one search for a brace. Text that is not JSON after all ends the
object: the reader is outside again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple


_WHITESPACE = " \n\r\t"
# Characters kept of the text before an object, and of a long string, of which no more is compared.
_MAX_LEAD, _MAX_WORD = 64, 512


class Place(IntEnum):
    """The part of a level that comes next, or that is being written."""

    BEFORE_KEY = 0
    KEY = 1
    AFTER_KEY = 2
    BEFORE_VALUE = 3
    STRING = 4
    WORD = 5  # a number, true, false or null
    AFTER_VALUE = 6


class Level(NamedTuple):
    """An open object or array.

    Attributes:
        above: level that holds this one; None for the outermost.
        is_object: False for an array.
        values: finished keys, each with its value as JSON text ("" for an object or array); empty for an array.
        key: key whose value comes next or was the last one; None before the first and in arrays.
        gap: whitespace after the opening bracket; None until something stands there.
    """

    above: Level | None
    is_object: bool
    values: tuple[tuple[str, str], ...] = ()
    key: str | None = None
    gap: str | None = None


@dataclass(slots=True)
class JsonText:
    """A reader of text. A copy reads on without changing the original.

    Attributes:
        level: innermost open object or array; None outside.
        place: place in that level.
        word: key, string (with its opening quote) or word that is being written.
        gap: whitespace since the last bracket, comma, colon or value.
        colon, comma: whitespace after these, as last seen on one line.
        lead: text before the outermost object, which is open or was closed last.
    """

    level: Level | None = None
    place: Place = Place.BEFORE_KEY
    word: str = ""
    gap: str = ""
    colon: str = " "
    comma: str = " "
    lead: str = ""
    _outside: str = ""

    def copy(self) -> JsonText:
        return replace(self)

    def feed(self, text: str) -> None:
        """Reads the next piece of the text."""
        at = 0
        while at < len(text):
            if self.level is None:
                at = self._search(text, at)
            elif self.place in (Place.KEY, Place.STRING):
                at = self._read_string(self.level, text, at)
            elif self._read_mark(self.level, text[at]):
                at += 1

    def _search(self, text: str, at: int) -> int:
        """Continues after the next opening brace."""
        brace = text.find("{", at)
        passed = text[at:] if brace < 0 else text[at:brace]
        self._outside = (self._outside + passed)[-_MAX_LEAD:]
        if brace < 0:
            return len(text)
        self.lead, self._outside = self._outside, ""
        self._open(is_object=True)
        return brace + 1

    def _read_string(self, level: Level, text: str, at: int) -> int:
        """Reads to the closing quote; the text is not JSON if the line ends before."""
        end = text.find('"', at)
        part = text[at:] if end < 0 else text[at:end]
        if "\n" in part:
            self._leave()
            return at + part.index("\n")
        self.word += part
        if len(self.word) > _MAX_WORD:
            self.word = '"' + self.word[-_MAX_WORD // 2 :]
        if end < 0:
            return len(text)
        is_escaped = (len(self.word) - len(self.word.rstrip("\\"))) % 2
        self.word += '"'
        if not is_escaped and self.place == Place.STRING:
            self._end_value(level, self.word)
        elif not is_escaped:
            self.level = level._replace(key=_key(self.word))
            self._move(Place.AFTER_KEY)
        return end + 1

    def _read_mark(self, level: Level, mark: str) -> bool:
        """Reads one character; False if it has to be read again, as the place has changed."""
        if self.place == Place.WORD:
            if mark.isalnum() or mark in "+-.":
                self.word += mark
                return True
            self._end_value(level, self.word)
            return False
        if mark in _WHITESPACE:
            self.gap += mark
            return True
        if self.place == Place.BEFORE_KEY and mark == '"':
            self._begin(level, Place.KEY, mark)
        elif self.place == Place.AFTER_KEY and mark == ":":
            self._move(Place.BEFORE_VALUE)
        elif self.place == Place.BEFORE_VALUE and (mark in '"{[-' or mark.isalnum()):
            self._begin_value(level, mark)
        elif self.place == Place.AFTER_VALUE and mark == ",":
            self._move(Place.BEFORE_KEY if level.is_object else Place.BEFORE_VALUE)
        elif mark == ("}" if level.is_object else "]") and self.place not in (Place.AFTER_KEY, Place.KEY):
            self._close(level)
        else:
            self._leave()
            return False
        return True

    def _begin_value(self, level: Level, mark: str) -> None:
        if level.is_object:
            if "\n" not in self.gap:
                self.colon = self.gap
            self._move(Place.STRING if mark == '"' else Place.WORD, mark)
        else:
            self._begin(level, Place.STRING if mark == '"' else Place.WORD, mark)
        if mark in "{[":
            self._open(is_object=mark == "{")

    def _begin(self, level: Level, place: Place, mark: str) -> None:
        """Begins a key or an item; the whitespace before it is how the writer separates them."""
        if level.gap is None:
            self.level = level._replace(gap=self.gap)
        elif "\n" not in self.gap:
            self.comma = self.gap
        self._move(place, mark)

    def _end_value(self, level: Level, text: str) -> None:
        if level.key is not None:
            self.level = level._replace(values=(*level.values, (level.key, text)))
        self._move(Place.AFTER_VALUE)

    def _open(self, is_object: bool) -> None:
        self.level = Level(self.level, is_object)
        self._move(Place.BEFORE_KEY if is_object else Place.BEFORE_VALUE)

    def _close(self, level: Level) -> None:
        self.level = level.above
        self._move(Place.AFTER_VALUE)
        if level.above is not None:
            self._end_value(level.above, "")

    def _leave(self) -> None:
        self.level, self.word, self.gap = None, "", ""

    def _move(self, place: Place, word: str = "") -> None:
        self.place, self.word, self.gap = place, word, ""


def _key(word: str) -> str:
    try:
        return json.loads(word)
    except ValueError:  # an escape that JSON does not have
        return word[1:-1]
