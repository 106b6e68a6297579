"""Speculators of models: what a `speculator=` argument means, and what is attached for code that calls `generate`
itself."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any, NamedTuple, cast

from transformers import PreTrainedModel

from ..drafting import Drafter
from ..errors import SpeculateError
from ..files import folder_state
from ..models import GenerativeModel, held_model
from ..registry import SpeculatorSpec, installed_drafters, joined_sources
from .speculator import Speculator, make_speculator


_resolved: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, _Made]] = weakref.WeakKeyDictionary()
_attached: weakref.WeakKeyDictionary[PreTrainedModel, Speculator] = weakref.WeakKeyDictionary()


class _Made(NamedTuple):
    """A speculator, and what the folders that it was made of held when they were read."""

    speculator: Speculator
    state: tuple[Any, ...]


def resolve(speculator: Speculator | Drafter | str | os.PathLike, model: GenerativeModel) -> Speculator:
    """The speculator that a `speculator=` argument means for `model`.

    A text is made into one once per model; a name wins over a path. Where files in a folder that the text names have
    changed since, it is made anew. A folder that is gone changes nothing.
    """
    if isinstance(speculator, Speculator):
        return speculator
    if isinstance(speculator, Drafter):
        raise TypeError("speculator= takes a Speculator, got a Drafter: wrap it, Speculator(drafter).")
    if not isinstance(speculator, str | os.PathLike):
        raise TypeError(
            f"speculator= takes a Speculator, the name of a drafter ({', '.join(installed_drafters())}) or the path / "
            f"Hub id of a head, with options behind a colon (name:key=value); got {type(speculator).__name__}."
        )
    key = os.fspath(speculator)
    known = _resolved.setdefault(model, {})
    state = tuple(map(folder_state, _folders(key)))  # before they are read: what changes meanwhile is read again
    if key not in known or (any(state) and state != known[key].state):
        known[key] = _Made(make_speculator(key, model), state)
    return known[key].speculator


@functools.lru_cache(maxsize=256)
def _folders(text: str) -> tuple[str, ...]:
    """The folders that a text may name: heads, draft models."""
    if text in installed_drafters():
        return ()
    spec = SpeculatorSpec.parse(text)
    values = (value for value in spec.options.values() if isinstance(value, str))
    return tuple(name for name in (*joined_sources(spec.source), *values) if name not in installed_drafters())


def attach(model: Any, speculator: Speculator | str | os.PathLike) -> Speculator:
    """Makes every later `model.generate(...)` use `speculator`, for code that calls `generate` itself.

    Requests that cannot run with a speculator (beams, …) warn once and run plain; `generate(..., speculator=None)`
    runs plain too. Nothing is stored on the model. Undo with `detach`.

    Args:
        model: also one that has a model inside generate for it (image and speech models): then that one is sped up; or
            what holds a model as `.model` (a pipeline, an evaluation harness).
        speculator: as for `generate`.
    Returns:
        The resolved speculator.
    Raises:
        SpeculateError: a model that generates nothing.
        TypeError: no model, nor anything that holds one.
    """
    model = held_model(model)
    generating = _generating(model)
    resolved = resolve(speculator, generating[-1])
    for part in generating:
        resolved.drafter.check_target(part)
    _attached.update(dict.fromkeys(generating, resolved))
    return resolved


def _generating(model: GenerativeModel) -> list[GenerativeModel]:
    """The models that `model.generate` may run in: itself; where it has a method of its own for that, also the models
    inside that have transformers'."""
    if _generates_as_stock(model):
        return [model]
    inner = [m for m in model.modules() if m is not model and isinstance(m, PreTrainedModel) and _generates_as_stock(m)]
    if not inner and not hasattr(model, "generate"):
        raise SpeculateError(
            f"{type(model).__name__} has no `generate`, nor has a model inside it: nothing to speed up."
        )
    return [model, *cast(list[GenerativeModel], inner)]


def _generates_as_stock(model: PreTrainedModel) -> bool:
    return getattr(getattr(type(model), "generate", None), "__hf_speculate__", False)


def detach(model: Any) -> Speculator:
    """Undoes `attach`; returns what was attached. Raises `SpeculateError` if nothing was."""
    found = None
    for part in _generating(held_model(model)):
        found = _attached.pop(part, None) or found
    if found is None:
        raise SpeculateError(f"no speculator is attached to this {type(model).__name__}.")
    return found


def attached(model: Any) -> Speculator | None:
    """The speculator attached to `model` (to one inside it, where that one generates for it), if any."""
    found = (_attached.get(part) for part in _generating(held_model(model)))
    return next(filter(None, found), None)


def attached_to(model: GenerativeModel) -> Speculator | None:
    """The speculator that a call of this very model's `generate` runs with, if any."""
    return _attached.get(model)


def speculators(model: Any) -> dict[str, Speculator]:
    """The speculators that were made for `model` from a text (`speculator="prompt_lookup"`), by that text: their
    statistics, cumulative over calls, are `.stats`."""
    return {text: made.speculator for text, made in _resolved.get(held_model(model), {}).items()}
