"""Which files of a folder are data, and of which split."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from hf_speculate.errors import SpeculateError
from hf_speculate.messages import get_logger


logger = get_logger(__name__)

_COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
# About data: they lie beside them in repositories.
_ABOUT = {"readme.md", "license.md", "license.txt", "citation.md", "dataset_infos.json"}
# The words that the Hub knows splits by, in names of files and folders.
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in words}


def data_files(folder: Path, split: str, suffixes: Collection[str]) -> list[str]:
    """Files of a folder that hold the records of a split, sorted.

    Hidden files and folders are left out, and READMEs and licences. A split is known by a word in the name of the file
    or of a folder above it, as on the Hub (`test.jsonl`, `data/train-00000.parquet`); files without one belong to
    "train". Python files have no split: `test_parser.py` is a text like any other. If no name says a split, all
    files belong to any.

    Args:
        split: "train", or another one; `train[:10%]` counts as `train`.
        suffixes: of data.
    Raises:
        SpeculateError: names say splits, and none is the one asked for.
    """
    inside = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    shown = [path for path in inside if not any(part.startswith(".") for part in path.parts)]
    found = [path for path in shown if suffix_of(path) in suffixes and path.name.lower() not in _ABOUT]
    splits = {path: _split_of(path) for path in found}
    if not any(splits.values()):
        return [str(folder / path) for path in found]
    asked = split.partition("[")[0]
    asked = _SPLIT_OF.get(asked, asked)
    chosen = [path for path in found if (splits[path] or "train") == asked]
    names = sorted({name or "train" for name in splits.values()})
    if not chosen:
        raise SpeculateError(
            f"the data {str(folder)!r} have no split {split!r}; there are: {', '.join(names)}. Possible: one of these "
            "(data.split), or the path of a file."
        )
    if len(chosen) < len(found):
        logger.warning_once(
            f"of {len(found)} data files in {folder} the {len(chosen)} of the split {asked!r} are read; there are also "
            f"{', '.join(name for name in names if name != asked)}."
        )
    return [str(folder / path) for path in chosen]


def suffix_of(path: Path) -> str:
    """The suffix that says what is in a file, below the one of its compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _split_of(path: Path) -> str | None:
    """By the innermost name that has a word for one."""
    if suffix_of(path) == ".py":
        return None
    for part in reversed(path.parts):
        words = re.split(r"[^a-z]+", part.lower())
        if found := next((_SPLIT_OF[word] for word in words if word in _SPLIT_OF), None):
            return found
    return None
