"""Recipes as text and as dataclasses.

A recipe holds plain values only. Sections become dataclasses: unknown keys are refused with a suggestion, values are
checked.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from hf_speculate.errors import SpeculateError
from hf_speculate.files import user_path


Section = TypeVar("Section")

MAX_BYTES = 1 << 20
_MANY = 30  # keys, too many to list with a suggestion


class RecipeError(SpeculateError, ValueError):
    """A recipe holds something unknown, secret or of the wrong type, or contradicts itself."""


def read_section(kind: type[Section], values: Mapping[str, Any], where: str) -> Section:
    """The dataclass `kind` made of plain values; raises `RecipeError` for unknown keys and values of the wrong type.

    `where` is the section's name in messages, e.g. "method.options".
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
    """The value of a text in YAML; raises `RecipeError` if it is not YAML. `what` is the text's name in messages."""
    try:
        return yaml.safe_load(text)
    # Integers and dates raise ValueErrors. The cause would quote the file, tokens included.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{what} is not YAML: {error}") from None


def plain_values(content: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of sections; raises `RecipeError` for a value that JSON does not have."""
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(
            f"the recipe cannot be used: {error}. It may hold sections, lists, texts (in quotes), finite numbers, "
            "true, false and null."
        ) from error
    return json.loads(text)
