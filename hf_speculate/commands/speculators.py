"""Speculators as command lines name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import SpeculateError, first_line
from ..models import SMOLLM2, GenerativeModel
from ..registry import SpeculatorSpec
from ..speculator import Speculator, make_speculator
from .targets import BUNDLED, bundled


_BUNDLED_DRAFT = "pycoder-draft"
_FROM_TEXT = ("prompt_lookup", "suffix")
_BUNDLED_HEADS = ("pycoder-eagle3", "pycoder-medusa")
_SMOLLM2_HEAD = "smollm2-eagle3"


def make_spec(spec: SpeculatorSpec, target: GenerativeModel, **defaults: Any) -> Speculator:
    """The speculator; every problem is a `SpeculateError`. Its own options beat `defaults`."""
    try:
        return make_speculator(spec.source, target, **(defaults | spec.options))
    except (TypeError, ValueError, OSError) as error:
        if isinstance(error, SpeculateError):
            raise
        raise SpeculateError(f"cannot make speculator {spec.text!r}: {first_line(error)}") from error


def parse_spec(text: str) -> SpeculatorSpec:
    """Raises `SpeculateError` for what cannot be read, and for names that are not installed."""
    spec = SpeculatorSpec.parse(text)
    spec.check_source()
    return spec


def parse_specs(texts: Sequence[str]) -> list[SpeculatorSpec]:
    """Raises `SpeculateError` where two of them would have the same name in tables."""
    specs = [parse_spec(text) for text in texts]
    names = [spec.label for spec in specs]
    if len(set(names)) != len(names):
        raise SpeculateError(f"two speculators have the same name: {', '.join(names)}.")
    return specs


def default_specs(target: str, branches: int = 1) -> list[SpeculatorSpec]:
    """What drafts from the text, and for the targets that heads are bundled for, these; for the bundled one a draft
    model too.

    Args:
        branches: a level of the draft model; 1 is a chain.
    """
    if target == SMOLLM2:
        head = bundled(_SMOLLM2_HEAD)
        return parse_specs([*_FROM_TEXT, *([head] if head else [])])
    if target != bundled(BUNDLED):
        return parse_specs(list(_FROM_TEXT))
    heads = [folder for folder in map(bundled, _BUNDLED_HEADS) if folder]
    draft = bundled(_BUNDLED_DRAFT)
    draft_specs = [f"draft_model:model={draft}" + (f",top_k={branches}" if branches > 1 else "")] if draft else []
    return parse_specs([*_FROM_TEXT, *heads, *draft_specs])


def table_specs(target: str) -> list[SpeculatorSpec]:
    """Those of `default_specs`, and the bundled EAGLE-3 head beside `suffix` and compiled."""
    defaults, head = default_specs(target), bundled(_BUNDLED_HEADS[0])
    if target != bundled(BUNDLED) or head is None:
        return defaults
    return [*defaults, *parse_specs([f"{head}+suffix", f"{head}:compile=true"])]
