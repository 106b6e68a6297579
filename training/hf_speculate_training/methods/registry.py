"""Installed training methods, found through the entry-point group `hf_speculate.training_methods`.

Built-in methods enter by the same door as third parties. Listing imports nothing; a method is imported when a recipe
asks for it, so a broken dependency of one does not hide the others.
"""

from __future__ import annotations

import difflib
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from hf_speculate.errors import SpeculateError

from ..sections import RecipeError
from .contract import TrainingMethod


GROUP = "hf_speculate.training_methods"


@lru_cache(maxsize=1)
def installed_methods() -> dict[str, EntryPoint]:
    """Name -> entry point of every installed method. Raises `SpeculateError` if two distributions claim a name."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        other = found.get(point.name)
        if other is not None and other.value != point.value:
            raise SpeculateError(
                f"two installed training methods are called {point.name!r}: {_origin(other)} and {_origin(point)}. "
                "Uninstall one of them."
            )
        found[point.name] = point
    return found


def check_method(name: str) -> None:
    """Raises `RecipeError`, with a suggestion, unless a method of that name is installed."""
    names = list(installed_methods())
    if name in names:
        return
    if not names:
        raise RecipeError(
            f"unknown training method {name!r}: no method is installed. Entry points are read from installed metadata: "
            "`pip install -e .` (again, after adding one)."
        )
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise RecipeError(f"unknown training method {name!r} in method.name.{hint} Installed: {', '.join(names)}.")


def load_method(name: str) -> type[TrainingMethod]:
    """The method installed under `name`.

    Raises:
        RecipeError: there is none; with a suggestion.
        SpeculateError: what is installed under that name is no `TrainingMethod`.
    """
    check_method(name)
    point = installed_methods()[name]
    method = point.load()
    if not (isinstance(method, type) and issubclass(method, TrainingMethod)):
        raise SpeculateError(f"entry point {name!r} ({_origin(point)}) is {method!r}, not a TrainingMethod class.")
    return method


def _origin(point: EntryPoint) -> str:
    return f"{point.value} of {point.dist.name if point.dist else 'an unknown distribution'}"
