"""The option `schemas`: JSON schemas and tool definitions, read into the shapes that values may have.

Of a schema it reads what can be drafted: `properties` in their order, `required`, `items`, `enum`, `const`, `type`,
local `$ref`, `anyOf`, `oneOf` and `allOf`. Anything else is ignored, since a draft may be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from hf_speculate.errors import OptionError

from .json_text import Level


Schema = Mapping[str, Any]
# References that are followed one after the other, and alternatives that are kept of one value.
_MAX_REFERENCES, _MAX_ALTERNATIVES = 16, 32
_ALTERNATIVES = ("anyOf", "oneOf")
_SCHEMA_WORDS = {"type", "properties", "items", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"}
_POSSIBLE = "Possible are JSON schemas, tools as `apply_chat_template(tools=)` takes them, functions with docstrings"


class Shape:
    """One alternative that a schema allows for a value. Parts are read when they are asked for: schemas may be
    recursive.

    Args:
        whole: schema in which references are looked up.

    Attributes:
        kind: the JSON type ("object", "array", "string", ...); "" if the schema has none.
        texts: JSON texts of the only values that are allowed; empty if there are others.
        is_open: whether an object's keys are unknown.
        required: names of the required properties.
    """

    def __init__(self, schema: Schema, whole: Schema):
        self._schema, self._whole = schema, whole
        kind = schema.get("type")
        self.kind: str = kind if isinstance(kind, str) else "object" if "properties" in schema else ""
        self.texts = _texts(schema, self.kind)
        self.is_open = "properties" not in schema
        self.required = frozenset(map(str, _listed(schema.get("required"))))

    @cached_property
    def properties(self) -> dict[str, list[Shape]]:
        """The alternatives of each property, in the order of the schema."""
        properties = self._schema.get("properties") or {}
        return {name: shapes_of(schema, self._whole) for name, schema in properties.items()}

    @cached_property
    def items(self) -> list[Shape]:
        """The alternatives of an array's items."""
        items = self._schema.get("items")
        return shapes_of(items, self._whole) if isinstance(items, Mapping) else []

    def at(self, level: Level) -> Sequence[Shape]:
        """The alternatives of the value that is next in a level of this shape."""
        return self.properties.get(level.key or "", ()) if level.is_object else self.items

    def allows(self, values: Iterable[tuple[str, str]]) -> bool:
        """Whether an object may hold these keys. Of values only constants are compared: they distinguish tools."""
        for key, text in values:
            shapes = self.properties.get(key)
            if shapes is None or (shapes and all(len(s.texts) == 1 and text not in s.texts for s in shapes)):
                return False
        return True


def shapes_of(schema: Any, whole: Schema) -> list[Shape]:
    """The alternatives of a schema; empty where it is not an object or a reference leads nowhere."""
    return [Shape(alternative, whole) for alternative in _expanded(schema, whole, _MAX_REFERENCES)[:_MAX_ALTERNATIVES]]


def _expanded(schema: Any, whole: Schema, left: int) -> list[dict[str, Any]]:
    if not isinstance(schema, Mapping) or not left:
        return []
    rest = {name: value for name, value in schema.items() if name not in ("$ref", "allOf", *_ALTERNATIVES)}
    alternatives = [rest]
    if "$ref" in schema:
        alternatives = _joined(alternatives, _expanded(_referred(schema["$ref"], whole), whole, left - 1))
    for name in _ALTERNATIVES:
        if isinstance(schema.get(name), list):
            choices = [choice for part in schema[name] for choice in _expanded(part, whole, left - 1)]
            alternatives = _joined(alternatives, choices)
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        alternatives = _joined(alternatives, _expanded(part, whole, left - 1))
    return [single for alternative in alternatives for single in _by_type(alternative)]


def _joined(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every alternative of one with every one of the other, properties together."""
    if not second:
        return first
    joined = []
    for one in first:
        for other in second[:_MAX_ALTERNATIVES]:
            both = {**one, **other}
            if "properties" in one and "properties" in other:
                both["properties"] = {**one["properties"], **other["properties"]}
            both["required"] = [*_listed(one.get("required")), *_listed(other.get("required"))]
            joined.append(both)
    return joined[:_MAX_ALTERNATIVES]


def _by_type(schema: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = schema.get("type")
    return [{**schema, "type": kind} for kind in kinds] if isinstance(kinds, list) else [schema]


def _referred(reference: Any, whole: Schema) -> Any:
    """The part of the same document that `#/$defs/name` names; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    part: Any = whole
    for name in reference[1:].split("/")[1:]:
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part


def _texts(schema: Schema, kind: str) -> tuple[str, ...]:
    if "const" in schema:
        values: Any = [schema["const"]]
    else:
        values = schema.get("enum", {"boolean": [True, False], "null": [None]}.get(kind, ()))
    if not isinstance(values, list | tuple) or any(isinstance(value, dict | list | tuple) for value in values):
        return ()
    return tuple(json.dumps(value, ensure_ascii=False, default=str) for value in values)


def read_schemas(schemas: Sequence[Any], arguments: str) -> list[Shape]:
    """The objects that may be written: what a schema describes, and calls of tools.

    Args:
        arguments: key that holds the arguments of a call.
    Raises:
        OptionError: something else, or a schema whose properties are not schemas.
    """
    if isinstance(schemas, str | bytes | Mapping) or not isinstance(schemas, Sequence):
        raise OptionError(f"suffix: schemas is a list, got one {_kind(schemas)}. {_POSSIBLE}.")
    return [shape for number, schema in enumerate(schemas) for shape in _read(schema, number, arguments)]


def _read(given: Any, number: int, arguments: str) -> list[Shape]:
    place = f"suffix: schema {number}"
    if callable(given):
        given = _of_function(given, place)
    if not isinstance(given, Mapping):
        raise OptionError(f"{place} is a {_kind(given)}. {_POSSIBLE}.")
    tool = given.get("function") if given.get("type") == "function" else given
    if not isinstance(tool, Mapping):
        raise OptionError(f'{place} is a tool whose "function" is a {_kind(tool)}, not a dict with "name".')
    if isinstance(tool.get("name"), str) and not _SCHEMA_WORDS & {*tool}:
        parameters = tool.get("parameters") or {}
        _check(parameters, f"{place}, the parameters of {tool['name']!r},")
        call = {"name": {"const": tool["name"]}, arguments: {"type": "object", **parameters}}
        return [Shape({"type": "object", "properties": call, "required": [*call]}, parameters)]
    if not _SCHEMA_WORDS & {*tool}:
        raise OptionError(f"{place} is a dict with {sorted(map(str, given))}. {_POSSIBLE}.")
    _check(tool, place)
    return shapes_of(tool, tool)


def _of_function(function: Callable[..., Any], place: str) -> Any:
    try:
        return get_json_schema(function)
    except Exception as error:  # what is missing: a docstring, a type, the description of an argument
        name = getattr(function, "__name__", _kind(function))
        raise OptionError(f"{place}: no schema can be made of the function {name}: {error}") from error


def _check(schema: Any, place: str) -> None:
    """Raises `OptionError` where a schema, or a part of it that will be read, is not a schema."""
    if isinstance(schema, bool):  # anything, or nothing
        return
    if not isinstance(schema, Mapping):
        raise OptionError(f"{place} is a {_kind(schema)}; a JSON schema is a dict.")
    for name in ("properties", "$defs", "definitions"):
        parts = schema.get(name, {})
        if not isinstance(parts, Mapping):
            raise OptionError(f"{place} has {name!r} that are a {_kind(parts)}; possible is a dict of schemas.")
        for key, part in parts.items():
            _check(part, f"{place} {name} {key!r}")
    if "items" in schema and not isinstance(schema["items"], list):
        _check(schema["items"], f"{place} items")
    for name in ("allOf", *_ALTERNATIVES):
        for part in _listed(schema.get(name)):
            _check(part, f"{place} {name}")


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _kind(value: Any) -> str:
    return type(value).__name__
