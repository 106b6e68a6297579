"""Likely continuations of a JSON object that follows a schema.

A forecast contains brackets, keys and constants, up to the next free value: a text, a number or a choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from .json_text import JsonText, Level, Place
from .schemas import Shape


# Largest number of alternatives to consider, and to keep.
_MAX_LOOKED_AT, _MAX_WAYS = 128, 24
# Largest number of levels that a forecast opens, and of values that it adds to a level. Schemas may be recursive.
_MAX_OPENED, _MAX_ADDED = 3, 6
_OPTIONAL = 0.7  # assumed probability that an optional key is written
_UNIT = "  "
_OPENING = re.compile(r"(?:<(?P<tag>[\w|]+)>|(?P<fence>```)\w*)(?P<gap>\s*)$")


class Continuation(NamedTuple):
    """One continuation.

    Attributes:
        text: text that follows.
        probe: one character that may follow the text; empty if the forecast is complete.
        prob: probability among all ways.
    """

    text: str
    probe: str
    prob: float = 1.0

    def prefixed(self, text: str, prob: float = 1.0) -> Continuation:
        return Continuation(text + self.text, self.probe, prob * self.prob)


class Forecast(NamedTuple):
    """A likely continuation.

    Attributes:
        kind: kind of text that comes next: "open", "key", "choice", "text", "number" or "more".
        ways: continuations, likely ones first.
    """

    kind: str
    ways: list[Continuation]


class Forecaster:
    """Continuations of JSON text.

    Args:
        stop: text of the token that ends an answer; "" if there is none.
    """

    def __init__(self, roots: Sequence[Shape], stop: str):
        self._roots, self._stop = roots, stop

    def __call__(self, text: JsonText) -> Forecast | None:
        """The likely continuations of `text`; None outside, or if it fits no schema."""
        if text.level is None or not self.fitting(text.level):
            return None
        return _Writer(self, text).forecast(text.level)

    def ends(self, text: JsonText) -> list[Continuation]:
        """The text after an outermost object: what closes its tag or fence, then the end or another call."""
        stop = Continuation(self._stop, "") if self._stop else Continuation("", "\n")
        opening = _OPENING.search(text.lead)
        if opening is None:
            return [stop]
        if opening["fence"]:
            return [stop.prefixed(opening["gap"] + "```")]
        closing = f"{opening['gap']}</{opening['tag']}>"
        again = Continuation("\n" + opening.group(), "{")
        return [stop.prefixed(closing, 0.5), again.prefixed(closing, 0.25), stop._replace(prob=0.25)]

    def fitting(self, level: Level) -> list[Shape]:
        """The shapes that an open level may have."""
        above = level.above
        shapes = self._roots if above is None else [inner for shape in self.fitting(above) for inner in shape.at(above)]
        kind = "object" if level.is_object else "array"
        values = level.values if level.is_object else ()
        return [shape for shape in shapes if shape.kind == kind and shape.allows(values)]


class _Writer:
    """Continuations in the style of one text."""

    def __init__(self, owner: Forecaster, text: JsonText):
        self._owner, self._text = owner, text
        self._lengths = [len(level.values) for level in _levels(text.level)]

    def forecast(self, level: Level) -> Forecast | None:
        text, word = self._text, self._text.word
        place = text.place
        if place in (Place.KEY, Place.BEFORE_KEY):
            kind = "open" if level.above is None and not level.values else "key"
            return _rest(kind, self._keys(level, "" if place == Place.KEY else self._gap(level)), word or text.gap)
        if place == Place.AFTER_KEY:
            return _rest("key", (w.prefixed(":" + text.colon) for w in self._values(level)), text.gap)
        if place == Place.AFTER_VALUE:
            return _rest("more", self._after_value(level), text.gap)
        if place == Place.BEFORE_VALUE:
            gap = text.colon if level.is_object else self._gap(level)
            return _rest("choice", (w.prefixed(gap) for w in self._choices(level)), text.gap)
        if choices := _rest("choice", self._choices(level), word):
            return choices
        if word == '"':  # an empty text is rare
            return None
        # The end of a free value is unknown. But if it ends here, the text after it is known.
        ending = "" if place == Place.WORD else '"'
        return _rest("text" if ending else "number", self._written(level, ending), "")

    def _keys(self, level: Level, gap: str) -> Iterator[Continuation]:
        """The next key and what follows it; only an object without keys may end here."""
        for name, prob in self._next_keys(level):
            if name is not None:
                before = f"{gap}{_quoted(name)}:{self._text.colon}"
                yield from (w.prefixed(before, prob) for w in self._named(level, name))
            elif not level.values:
                yield from (w.prefixed("}", prob) for w in self._closed(level))

    def _named(self, level: Level, name: str) -> Iterator[Continuation]:
        """The value of the key `name`."""
        return self._values(level._replace(key=name, gap=self._first_gap(level)))

    def _next_keys(self, level: Level) -> list[tuple[str | None, float]]:
        """Names that may come next with their probabilities; None stands for the closing bracket."""
        probs: dict[str | None, float] = {}
        for shape in self._owner.fitting(level):
            written = {name for name, _ in level.values}
            names = list(shape.properties)
            last = names.index(level.values[-1][0]) + 1 if level.values else 0
            left = 1.0
            for name in (name for name in names[last:] if name not in written):
                prob = left if name in shape.required else left * _OPTIONAL
                probs[name] = probs.get(name, 0.0) + prob
                left -= prob
                if left < 0.1:
                    break
            else:
                probs[None] = probs.get(None, 0.0) + left
        return list(probs.items())

    def _values(self, level: Level) -> Iterator[Continuation]:
        """The beginning of the value at `level.key`, or of an item; a constant and what follows it."""
        shapes = self._allowed(level)
        for shape in shapes:
            if len(shape.texts) == 1:
                yield from self._written(level, shape.texts[0])
            elif shape.texts:
                is_text = all(text.startswith('"') for text in shape.texts)
                yield Continuation('"', shape.texts[0][1:2]) if is_text else Continuation("", shape.texts[0][:1])
            elif shape.kind in ("object", "array"):
                yield from self._opened(level, shape)
            else:
                yield Continuation('"', "A") if shape.kind == "string" else Continuation("", "1" if shape.kind else '"')
        if not shapes:
            yield Continuation("", '"')

    def _choices(self, level: Level) -> Iterator[Continuation]:
        """The whole values where there are few, else their beginning."""
        for shape in self._allowed(level):
            if len(shape.texts) > 1:
                for text in shape.texts:
                    yield from self._written(level, text)
        yield from self._values(level)

    def _allowed(self, level: Level) -> list[Shape]:
        """The shapes that the value at `level.key`, or an item, may have."""
        return [inner for shape in self._owner.fitting(level) for inner in shape.at(level)]

    def _written(self, level: Level, value: str) -> Iterator[Continuation]:
        """A whole value, and what follows it."""
        return (way.prefixed(value) for way in self._after_value(_with_value(level, value)))

    def _opened(self, level: Level, shape: Shape) -> Iterator[Continuation]:
        """A nested object or array, to its first free value."""
        inner = Level(level, shape.kind == "object")
        gap = self._first_gap(inner)
        if not inner.is_object:
            yield from (w.prefixed("[" + gap) for w in self._values(inner._replace(gap=gap)))
        elif shape.is_open or len(_levels(level)) - len(self._lengths) >= _MAX_OPENED:
            yield Continuation("{", '"')
        else:
            yield from (w.prefixed("{") for w in self._keys(inner, gap))

    def _after_value(self, level: Level | None) -> Iterator[Continuation]:
        """The comma or the bracket after a finished value, and the text after that."""
        if level is None:
            yield from self._owner.ends(self._text)
            return
        if self._num_added(level) > _MAX_ADDED:
            yield Continuation("", ",")
            return
        comma = "," + self._next_gap(level)
        if not level.is_object:
            yield from (w.prefixed(comma, 0.5) for w in islice(self._values(level), 1))
            yield from (w.prefixed(self._closing_gap(level) + "]", 0.5) for w in self._closed(level))
            return
        for name, prob in self._next_keys(level):
            if name is None:
                yield from (w.prefixed(self._closing_gap(level) + "}", prob) for w in self._closed(level))
            else:
                before = f"{comma}{_quoted(name)}:{self._text.colon}"
                yield from (w.prefixed(before, prob) for w in islice(self._named(level, name), 4))

    def _closed(self, level: Level) -> Iterator[Continuation]:
        """The text after the bracket that closes a level."""
        return self._after_value(None if level.above is None else _with_value(level.above, ""))

    def _num_added(self, level: Level) -> int:
        """Values that the forecast has added to a level."""
        depth = len(_levels(level))
        return len(level.values) - (self._lengths[depth - 1] if depth <= len(self._lengths) else 0)

    def _gap(self, level: Level) -> str:
        return self._first_gap(level) if level.gap is None else self._next_gap(level)

    def _next_gap(self, level: Level) -> str:
        """The whitespace after a comma."""
        return level.gap if level.gap and "\n" in level.gap else self._text.comma

    def _first_gap(self, level: Level) -> str:
        """The whitespace after the opening bracket."""
        if level.gap is not None:
            return level.gap
        outer, now = level.above, self._text.gap
        if outer is not None and outer.gap and "\n" in outer.gap:
            return outer.gap + self._unit(outer)
        if level is self._text.level and "\n" in now:  # the first line break of an object
            return now if now.endswith(" ") else now + _UNIT
        return ""

    def _closing_gap(self, level: Level) -> str:
        if not level.gap or "\n" not in level.gap:
            return level.gap or ""
        return level.gap.removesuffix(self._unit(level))

    @staticmethod
    def _unit(level: Level) -> str:
        """One step of the indentation, by the outermost object that has one."""
        while level.above is not None and level.above.gap and "\n" in level.above.gap:
            level = level.above
        return (level.gap or "").rpartition("\n")[2] or _UNIT


def _levels(level: Level | None) -> list[Level]:
    """The open levels, the outermost first."""
    return [] if level is None else [*_levels(level.above), level]


def _with_value(level: Level, value: str) -> Level:
    return level._replace(values=(*level.values, (level.key or "", value)))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _shared(ways: Iterable[Continuation]) -> list[Continuation]:
    """Ways with probabilities that sum to one; equal ones become one."""
    probs: dict[tuple[str, str], float] = {}
    for text, probe, prob in islice(ways, _MAX_WAYS):
        probs[text, probe] = probs.get((text, probe), 0.0) + prob
    total = sum(probs.values())
    return [Continuation(*key, prob / total) for key, prob in probs.items()]


def _rest(kind: str, ways: Iterable[Continuation], written: str) -> Forecast | None:
    """The ways that begin with `written`, each without that text."""
    size = len(written)
    left = [
        way._replace(text=way.text[size:])
        for way in islice(ways, _MAX_LOOKED_AT)
        if len(way.text) > size and way.text.startswith(written)
    ]
    return Forecast(kind, _shared(left)) if left else None
