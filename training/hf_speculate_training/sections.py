"""Recipes as text and as dataclasses.

A recipe may come from anybody, so its YAML is bounded before it is built, and holds plain values only. Sections become
dataclasses: unknown keys are refused with a suggestion, values are checked.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from hf_speculate.errors import SpeculateError
from hf_speculate.files import user_path


Section = TypeVar("Section")

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
_MAX_NODES = 10_000
_MAX_DIGITS = 40
# Names of files have no zero byte, and surrogates cannot be written in UTF-8.
_WRITABLE = re.compile(r"[^\0\ud800-\udfff]*")
_MANY = 30  # keys, too many to list with a suggestion


class RecipeError(SpeculateError, ValueError):
    """A recipe holds something unknown, secret or of the wrong type, or contradicts itself."""


def read_section(kind: type[Section], values: Mapping[str, Any], where: str) -> Section:
    """The dataclass `kind` made of plain values.

    Args:
        kind: the dataclass; its annotations give the accepted values.
        values: plain values by field.
        where: the section's name in messages, e.g. "method.options".
    Raises:
        RecipeError: a key is not a field, a value has the wrong type, or the dataclass itself refuses it.
    """
    refuse_unknown(values, field_names(kind), where)
    return validated(kind, values, f"the section {where}")


def validated(kind: type[Section], values: Mapping[str, Any], what: str) -> Section:
    """An object of `kind` made of plain values; raises `RecipeError` that lists every wrong value."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        lines = [_problem(entry["loc"], entry["msg"]) for entry in error.errors()]
        raise RecipeError(f"{what} cannot be used: {'; '.join(lines)}.") from error


def expand_home(section: Any, *names: str) -> None:
    """Replaces "~" in some paths of a frozen section: no shell reads a recipe. None stays."""
    for name in names:
        if (path := getattr(section, name)) is not None:
            object.__setattr__(section, name, user_path(path))


def refuse_unknown(given: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raises `RecipeError`, with a suggestion, if a name in `given` is not in `known`."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            possible = "" if close and len(known) > _MANY else f" Possible: {', '.join(known) or 'none'}."
            raise RecipeError(f"unknown key {name!r} in {where}.{hint}{possible}")


def field_names(kind: Any) -> list[str]:
    """The fields of a dataclass that can be given."""
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _problem(place: Sequence[int | str], message: str) -> str:
    own = message.removeprefix("Value error, ")  # the dataclass's own message
    text = message.lower() if own == message else own.rstrip(".")
    return f"{'.'.join(map(str, place))}: {text}" if place else text


def parse_yaml(text: str, what: str) -> Any:
    """The value of a text in YAML.

    Args:
        text: the text.
        what: the text's name in messages.
    Raises:
        RecipeError: the text is not YAML, or larger than any recipe: nested deeper than 32 levels, more than 10,000
            values with all aliases written out, a value that contains itself.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{what} is not YAML: {error}") from None  # it quotes the file, tokens included
    except ValueError as error:  # of dates and integers
        raise RecipeError(f"{what} holds a value that cannot be read: {error}.") from None


def check_plain(value: Any, place: str = "", depth: int = 0) -> None:
    """Refuses values that a recipe cannot hold.

    Raises:
        RecipeError: a value is not a section, list, text, number, true, false or null; a number is not finite; values
            are nested too deeply.
    """
    where = place.lstrip(".")[:100] or "the recipe"
    if depth > MAX_DEPTH:
        raise RecipeError(f"{where} is nested deeper than {MAX_DEPTH} levels.")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RecipeError(f"{where} has the key {str(key)[:40]!r}: keys are texts; write it in quotes.")
            check_plain(key, place, depth + 1)
            check_plain(item, f"{place}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            check_plain(item, place, depth + 1)
    elif isinstance(value, str):
        if not _WRITABLE.fullmatch(value):
            raise RecipeError(f"{where} holds a zero byte or half a character: {value[:40]!r}.")
    elif isinstance(value, bool | None):
        return
    elif not isinstance(value, int | float):
        raise RecipeError(f"{where} is a {type(value).__name__}: write a text in quotes, or a number.")
    elif isinstance(value, int) and abs(value) >= 10**_MAX_DIGITS:
        raise RecipeError(f"{where} is an integer of more than {_MAX_DIGITS} digits.")
    elif not math.isfinite(value):
        raise RecipeError(f"{where} is {value}: it must be a finite number.")


class _Loader(yaml.SafeLoader):
    """Counts values while they are parsed. `1e-4` is a number and `12:30` a text here, unlike in YAML 1.1.

    An alias counts as all values that it stands for: ten lines of aliases can fill any memory.
    """

    def __init__(self, stream: str):
        super().__init__(stream)
        self._depth = self._num_nodes = 0
        self._sizes: dict[str, int] = {}  # by anchor, of values that are complete

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        before = self._num_nodes
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self.anchors and event.anchor not in self._sizes:
                raise yaml.YAMLError(f"the value &{event.anchor} contains itself")
            self._num_nodes += self._sizes.get(event.anchor, 0)
        self._depth, self._num_nodes = self._depth + 1, self._num_nodes + 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"it is nested deeper than {MAX_DEPTH} levels")
        if self._num_nodes > _MAX_NODES:
            raise yaml.YAMLError(f"it has more than {_MAX_NODES} values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent) and event.anchor is not None:
            self._sizes[event.anchor] = self._num_nodes - before
        return node

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        if ":" in node.value:  # base 60, which is never meant
            return node.value
        is_int = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)
