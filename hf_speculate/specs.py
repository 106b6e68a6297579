"""A speculator in one line of text: the name of a drafter or the place of a head, and options."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DrafterNotFoundError, SpeculateError
from .registry import installed_drafters, unknown_drafter_message


@dataclass(frozen=True)
class SpeculatorSpec:
    """`NAME_OR_PATH[:option=value,...]`, e.g. `draft_model:model=PATH,depth=4,top_k=2`.

    Attributes:
        text: all of it.
        source: name, folder or Hub id; several joined by "+".
        options: by name; numbers and booleans as such, everything else as text.
    """

    text: str
    source: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> SpeculatorSpec:
        """Raises `SpeculateError` for what cannot be read; what exists as a path is one, whatever it is called."""
        if os.path.exists(text):
            return cls(text, text, {})
        source, separator, rest = text.partition(":")
        if separator and "=" not in rest:
            raise SpeculateError(
                f"cannot read speculator {text!r}: options are NAME:key=value,key=value, "
                "e.g. draft_model:model=PATH,depth=4."
            )
        options = {}
        for pair in filter(None, rest.split(",")):
            key, equals, value = pair.partition("=")
            if not equals or not key:
                raise SpeculateError(f"cannot read option {pair!r} of speculator {text!r}: it must be key=value.")
            options[key.strip()] = _value(value.strip())
        return cls(text, source, options)

    def with_option(self, name: str, value: Any) -> SpeculatorSpec:
        """The same with one option more, or another value of it."""
        options = self.options | {name: value}
        pairs = (f"{key}={each if isinstance(each, str) else json.dumps(each)}" for key, each in options.items())
        return SpeculatorSpec(f"{self.source}:{','.join(pairs)}", self.source, options)

    def check_source(self) -> None:
        """Raises `DrafterNotFoundError` for what is neither installed, nor a folder, nor a Hub id."""
        for source in joined_sources(self.source):
            if source not in installed_drafters() and not os.path.isdir(source) and "/" not in source:
                raise DrafterNotFoundError(unknown_drafter_message(source))

    @property
    def label(self) -> str:
        """The text with paths cut to their last part."""
        options = ",".join(f"{k}={Path(v).name if isinstance(v, str) else v}" for k, v in self.options.items())
        source = self.source if self.source in installed_drafters() else Path(self.source).name
        return f"{source}:{options}" if options else source


def joined_sources(source: str) -> list[str]:
    """The drafters and heads that "a+b" or "a + b" joins; a folder of such a name is one. (Hub ids have no "+".)"""
    return [source] if os.path.exists(source) else [part.strip() for part in source.split("+")]


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, int | float | bool) else text
