"""Recipes that are shipped, by name."""

from __future__ import annotations

import os
from pathlib import Path

from hf_speculate.registry import unknown_name_message

from ..sections import RecipeError


_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel inside the package, in a checkout beside it.
_FOLDERS = (_PACKAGE / "recipes", _PACKAGE.parent / "recipes")


def recipe_names() -> list[str]:
    """Names that `find_recipe` knows."""
    return sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.yaml")})


def find_recipe(name_or_path: str | os.PathLike) -> Path:
    """The file of a recipe: the path itself, or a shipped recipe of that name.

    Raises:
        RecipeError: neither; with a suggestion.
    """
    path = Path(name_or_path)
    name = os.fspath(name_or_path)
    if path.exists() or path.suffix.lower() in (".yaml", ".yml", ".json") or path.name != name:
        return path
    found = next((folder / f"{name}.yaml" for folder in _FOLDERS if (folder / f"{name}.yaml").is_file()), None)
    if found is None:
        raise RecipeError(f"{unknown_name_message(name, recipe_names(), 'recipe')} Or give the path of a file.")
    return found
