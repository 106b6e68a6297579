"""Sections of a recipe as dataclasses: unknown keys are refused with a suggestion, values are checked."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hf_speculate.errors import SpeculateError


Section = TypeVar("Section")

_MANY = 30  # keys, too many to list beside a suggestion


class RecipeError(SpeculateError, ValueError):
    """A recipe that says what is unknown, of the wrong type, secret, or contradicts itself."""


def read_section(kind: type[Section], values: Mapping[str, Any], where: str) -> Section:
    """The dataclass `kind` made of plain values.

    Args:
        kind: its annotations say what values are accepted.
        values: by field.
        where: the section's name in messages, e.g. "method.options".
    Raises:
        RecipeError: a key that is no field, a value of the wrong type, or one that the dataclass itself refuses.
    """
    refuse_unknown(values, field_names(kind), where)
    return validated(kind, values, f"the section {where}")


def validated(kind: type[Section], values: Mapping[str, Any], what: str) -> Section:
    """`kind` of plain values; raises `RecipeError` that lists every value that is wrong."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        lines = [_problem(entry["loc"], entry["msg"]) for entry in error.errors()]
        raise RecipeError(f"{what} cannot be used: {'; '.join(lines)}.") from error


def refuse_unknown(given: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raises `RecipeError`, with a suggestion, if `given` names what `known` does not have."""
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
    own = message.removeprefix("Value error, ")  # what a dataclass said itself
    text = message.lower() if own == message else own.rstrip(".")
    return f"{'.'.join(map(str, place))}: {text}" if place else text
