"""Installed training methods, found through the entry-point group `hf_speculate.training_methods`.

Built-in methods enter by the same door as third parties. Listing imports nothing; a method is imported when a recipe
asks for it, so a broken dependency of one does not hide the others.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import EntryPoint

from hf_speculate.registry import find_installed, load_installed, unknown_name_message

from ..sections import RecipeError
from .contract import TrainingMethod


GROUP = "hf_speculate.training_methods"
_WHAT = "training method"


@lru_cache(maxsize=1)
def installed_methods() -> dict[str, EntryPoint]:
    """Name -> entry point of every installed method. Raises `SpeculateError` if two distributions claim a name."""
    return find_installed(GROUP, _WHAT)


def check_method(name: str) -> None:
    """Raises `RecipeError`, with a suggestion, unless a method of that name is installed."""
    names = installed_methods()
    if name not in names:
        raise RecipeError(unknown_name_message(name, names, _WHAT, " in method.name"))


def load_method(name: str) -> type[TrainingMethod]:
    """The method installed under `name`.

    Raises:
        RecipeError: there is none; with a suggestion.
        SpeculateError: what is installed under that name is no `TrainingMethod`.
    """
    check_method(name)
    return load_installed(installed_methods()[name], TrainingMethod)
