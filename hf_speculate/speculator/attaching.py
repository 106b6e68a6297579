"""Speculators of models: the meaning of a `speculator=` argument, and speculators attached for code that calls
`generate` itself."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any, NamedTuple, cast

from ..drafting import Drafter
from ..errors import OptionError, SpeculateError
from ..files import folder_state, user_path
from ..target import GenerativeModel, held_model
from .registry import SpeculatorSpec, installed_drafters, joined_sources
from .speculator import Speculator, make_speculator, refuse_model


_resolved: weakref.WeakKeyDictionary[GenerativeModel, dict[str, _Made]] = weakref.WeakKeyDictionary()
_attached: weakref.WeakKeyDictionary[GenerativeModel, Speculator] = weakref.WeakKeyDictionary()


class _Made(NamedTuple):
    """A speculator, and the state of its folders when they were read."""

    speculator: Speculator
    state: tuple[Any, ...]


def resolve(speculator: Speculator | Drafter | str | os.PathLike, model: GenerativeModel) -> Speculator:
    """The speculator that a `speculator=` argument means for `model`.

    A text is turned into a speculator once per model; a name wins over a path. If files in a folder that the text names
    have changed since, the speculator is made again. A folder that no longer exists changes nothing.
    """
    if isinstance(speculator, Speculator):
        return speculator
    if isinstance(speculator, Drafter):
        raise OptionError("speculator= takes a Speculator, got a Drafter: wrap it, Speculator(drafter).")
    refuse_model(speculator, "speculator=")
    if not isinstance(speculator, str | os.PathLike):
        raise OptionError(
            f"speculator= takes a Speculator, the name of a drafter ({', '.join(installed_drafters())}) or the path / "
            f"Hub id of a head, with options after a colon (name:key=value); got {type(speculator).__name__}."
        )
    key = os.fspath(speculator)
    known = _resolved.setdefault(model, {})
    # taken before they are read: a file that changes meanwhile is read again
    state = tuple(map(folder_state, _folders(key)))
    if key not in known or (any(state) and state != known[key].state):
        known[key] = _Made(make_speculator(key, model), state)
    return known[key].speculator


@functools.lru_cache(maxsize=256)
def _folders(text: str) -> tuple[str, ...]:
    """The folders that a text may name: heads, draft models."""
    if text in installed_drafters():
        return ()
    spec = SpeculatorSpec.parse(text)
    values = [user_path(value) for value in spec.options.values() if isinstance(value, str)]
    parts = joined_sources(spec.source)
    own = parts if len(parts) == 1 else [folder for part in parts for folder in _folders(part)]
    return tuple(name for name in (*own, *values) if name not in installed_drafters())


def attach(model: Any, speculator: Speculator | str | os.PathLike) -> Speculator:
    """Makes every later `model.generate(...)` use `speculator`, for code that calls `generate` itself.

    Requests that cannot run with a speculator (beams, …) warn once and run plain. So does `generate(...,
    speculator=None)`, without the warning. Nothing is stored on the model. `detach` undoes it.

    Args:
        model: model to speed up. A model inside it may generate for it (image and speech models). It may also be an
            object that holds a model as `.model` (a pipeline, an evaluation harness).
        speculator: speculator, name or path, as for `generate(speculator=)`.

    Returns:
        The resolved speculator.

    Raises:
        SpeculateError: the model generates nothing.
        TypeError: the object is not a model and holds none.
    """
    model = held_model(model)
    generating = _generating(model)
    resolved = resolve(speculator, generating[-1])
    for part in generating:
        resolved.drafter.check_target(part)
    _attached.update(dict.fromkeys(generating, resolved))
    return resolved


def _generating(model: GenerativeModel) -> list[GenerativeModel]:
    """The models that `model.generate` may run in.

    That is the model itself. If it has a `generate` of its own, models inside it with transformers' `generate` are
    included.
    """
    if _generates_as_stock(model):
        return [model]
    inner = [m for m in model.modules() if m is not model and isinstance(m, GenerativeModel) and _generates_as_stock(m)]
    if not inner and not hasattr(model, "generate"):
        raise SpeculateError(
            f"{type(model).__name__} has no `generate`, nor has a model inside it: nothing to speed up."
        )
    return [model, *cast(list[GenerativeModel], inner)]


def _generates_as_stock(model: GenerativeModel) -> bool:
    return getattr(getattr(type(model), "generate", None), "__hf_speculate__", False)


def detach(model: Any) -> Speculator:
    """Undoes `attach`; returns the speculator that was attached. Raises `SpeculateError` if there was none."""
    speculator = None
    for part in _generating(held_model(model)):
        speculator = _attached.pop(part, None) or speculator
    if speculator is None:
        raise SpeculateError(f"no speculator is attached to this {type(model).__name__}.")
    return speculator


def attached(model: Any) -> Speculator | None:
    """The speculator attached to `model`, or to a model inside that generates for it; None if there is none."""
    speculators = (_attached.get(part) for part in _generating(held_model(model)))
    return next(filter(None, speculators), None)


def attached_to(model: GenerativeModel) -> Speculator | None:
    """The speculator that this very model's `generate` runs with; None if there is none."""
    return _attached.get(model)


def speculators(model: Any) -> dict[str, Speculator]:
    """The speculators made for `model` from texts (`speculator="prompt_lookup"`), by that text.

    Their statistics, cumulative over calls, are `.stats`.
    """
    return {text: made.speculator for text, made in _resolved.get(held_model(model), {}).items()}
