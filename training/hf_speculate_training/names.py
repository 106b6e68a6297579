"""Names in command lines and recipes: methods, shipped recipes, data files, dtypes. They are checked without torch."""

from __future__ import annotations

import glob
import os
import re
from functools import lru_cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import read_bytes, user_path
from hf_speculate.speculator.registry import find_installed, unknown_name_message  # the package imports torch

from .sections import MAX_BYTES, RecipeError, parse_yaml


DtypeName: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
QuantizationName: TypeAlias = Literal["4bit", "8bit"]

GROUP = "hf_speculate.training_methods"
_WHAT = "training method"

_PACKAGE = Path(__file__).resolve().parent
# A wheel has the recipes inside the package, a checkout next to it.
_FOLDERS = (_PACKAGE / "recipes", _PACKAGE.parent / "recipes")

# Suffix -> builder of `datasets`.
BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".py": "text",
}
_COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
_ABOUT = {"readme.md", "license.md", "license.txt", "citation.md", "dataset_infos.json"}  # about the data


@lru_cache(maxsize=1)
def installed_methods() -> dict[str, EntryPoint]:
    """Entry points of all installed methods by name; raises `SpeculateError` if two distributions claim one."""
    return find_installed(GROUP, _WHAT)


def check_method(name: str) -> None:
    """Raises `RecipeError`, with a suggestion, unless a method of that name is installed."""
    names = installed_methods()
    if name not in names:
        raise RecipeError(unknown_name_message(name, names, _WHAT, " in method.name"))


def recipe_names() -> list[str]:
    """The names of all shipped recipes."""
    return sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.yaml")})


def find_recipe(name_or_path: str | os.PathLike) -> Path:
    """The file of a recipe: the path itself, or the shipped recipe of that name."""
    name = user_path(name_or_path)
    path = Path(name)
    if path.exists() or path.suffix.lower() in (".yaml", ".yml", ".json") or path.name != name:
        return path
    found = next((folder / f"{name}.yaml" for folder in _FOLDERS if (folder / f"{name}.yaml").is_file()), None)
    if found is None:
        raise RecipeError(f"{unknown_name_message(name, recipe_names(), 'recipe')} Or give the path of a file.")
    return found


def recipe_content(path: str | os.PathLike) -> Any:
    """The value of a recipe's file; raises `RecipeError` if there is no such file, or it is not YAML."""
    try:
        text = read_bytes(find_recipe(path), MAX_BYTES).decode("utf-8")
    except (CheckpointError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    return parse_yaml(text, str(path))


def check_source(source: str) -> None:
    """Raises `SpeculateError` if a source of data is on this machine by its name, and is not there. Reads nothing."""
    local_files(source)


def local_files(name: str) -> list[str] | None:
    """The data files of a name, sorted; None for a name that is not of this machine."""
    path = Path(name).expanduser()
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        inside = [file for file in path.rglob("*") if file.is_file() and is_data(file)]
        files = sorted(str(file) for file in inside if not re.search(r"(^|/)\.", file.relative_to(path).as_posix()))
    elif glob.has_magic(name):
        files = sorted(file for file in glob.glob(str(path), recursive=True) if os.path.isfile(file))
    elif name.startswith((".", "/", "~")) or suffix_of(path) in BUILDERS or name.count("/") > 1:
        raise SpeculateError(f"cannot read the data {name!r}: no such file or folder.")
    else:
        return None
    if not files:
        raise SpeculateError(f"no data files in {name!r}; read are {', '.join(BUILDERS)}.")
    return files


def is_data(file: str | Path) -> bool:
    """Whether a file holds records, by its name."""
    path = Path(file)
    return suffix_of(path) in BUILDERS and path.name.lower() not in _ABOUT


def suffix_of(path: Path) -> str:
    """The suffix that names the format of a file, without that of its compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""
