"""Speculators as command lines name them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DrafterNotFoundError, SpeculateError
from ..models import GenerativeModel
from ..registry import installed_drafters, unknown_drafter_message
from ..speculator import Speculator, make_speculator
from .targets import BUNDLED, SMOLLM2, bundled, first_line


_BUNDLED_DRAFT = "pycoder-draft"
_BUNDLED_HEADS = ("pycoder-eagle3", "pycoder-medusa")
_SMOLLM2_HEAD = "smollm2-eagle3"


@dataclass(frozen=True)
class SpeculatorSpec:
    """`NAME_OR_PATH[:option=value,...]`, e.g. `draft_model:model=PATH,depth=4,top_k=2`."""

    text: str
    source: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> SpeculatorSpec:
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
        if source not in installed_drafters() and not os.path.isdir(source) and "/" not in source:
            raise DrafterNotFoundError(unknown_drafter_message(source))
        return cls(text, source, options)

    @property
    def label(self) -> str:
        """The text with paths cut to their last part."""
        options = ",".join(f"{k}={Path(v).name if isinstance(v, str) else v}" for k, v in self.options.items())
        source = self.source if self.source in installed_drafters() else Path(self.source).name
        return f"{source}:{options}" if options else source

    def make(self, target: GenerativeModel, **defaults: Any) -> Speculator:
        """The speculator; every problem is a `SpeculateError` that names the spec. Its own options beat `defaults`."""
        options = defaults | self.options
        try:
            return make_speculator(self.source, target, **options)
        except (TypeError, ValueError, OSError) as error:
            if isinstance(error, SpeculateError):
                raise
            raise SpeculateError(f"cannot make speculator {self.text!r}: {first_line(error)}") from error


def parse_specs(texts: Sequence[str]) -> list[SpeculatorSpec]:
    """Raises `SpeculateError` where two of them would have the same name in tables."""
    specs = [SpeculatorSpec.parse(text) for text in texts]
    names = [spec.label for spec in specs]
    if len(set(names)) != len(names):
        raise SpeculateError(f"two speculators have the same name: {', '.join(names)}.")
    return specs


def default_specs(target: str, branches: int = 1) -> list[SpeculatorSpec]:
    """Prompt lookup, and for the targets that heads are bundled for, these; for the bundled one a draft model too.

    Args:
        branches: a level of the draft model; 1 is a chain.
    """
    if target == SMOLLM2:
        head = bundled(_SMOLLM2_HEAD)
        return parse_specs(["prompt_lookup", *([head] if head else [])])
    if target != bundled(BUNDLED):
        return parse_specs(["prompt_lookup"])
    heads = [folder for folder in map(bundled, _BUNDLED_HEADS) if folder]
    draft = bundled(_BUNDLED_DRAFT)
    draft_specs = [f"draft_model:model={draft}" + (f",top_k={branches}" if branches > 1 else "")] if draft else []
    return parse_specs(["prompt_lookup", *heads, *draft_specs])


def table_specs(target: str) -> list[SpeculatorSpec]:
    """Those of `default_specs`, and the bundled EAGLE-3 head beside prompt lookup and compiled."""
    defaults, head = default_specs(target), bundled(_BUNDLED_HEADS[0])
    if target != bundled(BUNDLED) or head is None:
        return defaults
    return [*defaults, *parse_specs([f"{head}+prompt_lookup", f"{head}:compile=true"])]


def _value(text: str) -> Any:
    """Numbers and booleans as such, everything else as text."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, int | float | bool) else text
