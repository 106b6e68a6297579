"""The records of a source: local files, folders, glob patterns, Hub ids, or a dataset that exists already."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    Value,
    load_dataset,
    load_from_disk,
)
from datasets.data_files import SPLIT_KEYWORDS
from datasets.exceptions import DatasetGenerationError

from hf_speculate.errors import SpeculateError, first_line
from hf_speculate.messages import get_logger


logger = get_logger(__name__)

Source: TypeAlias = str | os.PathLike | Dataset

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
# Of files that cannot be read: Arrow's and pandas' errors are ValueErrors.
_ERRORS = (OSError, ValueError, DatasetGenerationError)
_COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
_ABOUT = {"readme.md", "license.md", "license.txt", "citation.md", "dataset_infos.json"}  # about the data
# The words by which the Hub knows splits, in names of files and folders.
_SPLIT_OF = {word: str(split) for split, words in SPLIT_KEYWORDS.items() for word in words}


def load_records(
    source: Source,
    *,
    split: str = "train",
    config: str | None = None,
    revision: str | None = None,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> Dataset:
    """The records of a source, as they are.

    Args:
        source: a json, jsonl, parquet, arrow, csv or text file in UTF-8 (compressed too), a folder of them (see
            `data_files`) or one that `Dataset.save_to_disk` wrote, a glob pattern, a Hub id, or a dataset. A text file
            is one record, `text`: blank lines mean too many things.
        split: split of a Hub id, a saved dataset, or a folder whose files are named after splits.
        config, revision: configuration and revision of a Hub id.
        columns: our name -> the source's name, e.g. `{"prompt": "question", "completion": "answer"}`.
        limit: number of records to read; None for all.
    Raises:
        SpeculateError: nothing there, not readable, no records, no such column, a stream.
    """
    if isinstance(source, IterableDataset):
        raise SpeculateError("the data are a stream, and training packs all of them first: give a Dataset.")
    records = _plain(source if isinstance(source, Dataset) else _open(source, split, config, revision))
    name = describe_source(source)
    if len(records) == 0:
        raise SpeculateError(f"the data {name!r} hold no records.")
    records = _renamed(records, columns or {}, name)
    return records if limit is None else records.take(limit)


def check_source(source: str, split: str = "train") -> None:
    """Raises `SpeculateError` if a source is on this machine by its name, and is not there. Reads nothing."""
    _local_files(source, split)


def describe_source(source: Source) -> str:
    """The name of a source in messages and provenance."""
    if isinstance(source, Dataset):
        return f"Dataset({len(source)} records, fingerprint {source._fingerprint})"
    return os.fspath(source)


def _plain(records: Dataset) -> Dataset:
    """Records of lists and numbers, not the tensors as which some data sets are saved. A user's transform stays."""
    return records if records.format["type"] in (None, "custom") else records.with_format(None)


def _open(source: str | os.PathLike, split: str, config: str | None, revision: str | None) -> Dataset:
    name = os.fspath(source)
    files = _local_files(name, split)
    try:
        if files is None:
            found: Any = load_dataset(name, config, split=split, revision=revision)
        elif not files:
            found = load_from_disk(os.path.expanduser(name))
        else:
            found = _read_files(name, files)
        if isinstance(found, Dataset):
            found.data.validate(full=True)  # Arrow reads JSON without a look at its encoding
    except _ERRORS as error:
        raise SpeculateError(_problem(name, files, error)) from error
    if isinstance(found, DatasetDict):
        if split not in found:
            raise SpeculateError(f"the data {name!r} have no split {split!r}; there are: {', '.join(map(str, found))}.")
        found = found[split]
    return found


def _local_files(name: str, split: str) -> list[str] | None:
    """The files to read: none for a folder that `save_to_disk` wrote, None for a name that is not of this machine."""
    path = Path(name).expanduser()
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            return []
        files = data_files(path, split)
    elif glob.has_magic(name):
        files = sorted(file for file in glob.glob(str(path), recursive=True) if os.path.isfile(file))
    elif name.startswith((".", "/", "~")) or suffix_of(path) in BUILDERS or name.count("/") > 1:
        raise SpeculateError(f"cannot read the data {name!r}: no such file or folder.")
    else:
        return None
    if not files:
        raise SpeculateError(f"no data files in {name!r}; read are {', '.join(BUILDERS)}.")
    return files


def _read_files(name: str, files: list[str]) -> Dataset:
    suffixes = {suffix_of(Path(file)) for file in files}
    builders = {BUILDERS.get(suffix) for suffix in suffixes}
    if len(builders) > 1 or None in builders:
        raise SpeculateError(
            f"the data {name!r} are files of the kinds {', '.join(sorted(suffixes))}: give one of "
            f"{', '.join(BUILDERS)} at a time."
        )
    builder = builders.pop() or ""
    if all(os.path.getsize(file) == 0 for file in files):
        raise SpeculateError(f"the data {name!r} hold no records: nothing but empty files.")
    options: dict[str, Any] = {}
    if builder == "text":
        options = {"sample_by": "document"}
    elif builder == "csv":
        # All cells are texts, as they stand there: 1.10 is not 1.1, and only an empty cell is none.
        header = pd.read_csv(files[0], nrows=0).columns
        options = {"features": Features({str(column): Value("string") for column in header})}
        options |= {"keep_default_na": False, "na_values": [""]}
    literal = [glob.escape(file) for file in files]  # `datasets` takes names for patterns
    return load_dataset(builder, data_files=literal, split="train", **options)


def _renamed(records: Dataset, columns: Mapping[str, str], name: str) -> Dataset:
    if not columns:
        return records
    found = records.column_names
    missing = [column for column in columns.values() if column not in found]
    if missing:
        raise SpeculateError(f"the data {name!r} have no column {missing[0]!r}; there are: {', '.join(found)}.")
    kept = [column for column in columns if column in found and column not in columns.values()]
    records = records.remove_columns(kept) if kept else records
    return records.rename_columns({theirs: ours for ours, theirs in columns.items() if theirs != ours})


def _problem(name: str, files: list[str] | None, error: BaseException) -> str:
    line = first_line(error.__cause__ or error)
    if files is None:
        return f"cannot read the data {name!r}: it is neither a file or folder here nor readable from the Hub ({line})."
    together = f" ({len(files)} files, read as one table: their columns must be the same)" if len(files) > 1 else ""
    encoding = " Files must be in UTF-8: `iconv -f latin1 -t utf-8` converts." if "utf" in line.lower() else ""
    return f"cannot read the data {name!r}{together}: {line}{encoding}"


def data_files(folder: Path, split: str) -> list[str]:
    """Files of a folder that hold the records of a split, sorted.

    Hidden files, READMEs and licences are left out. A word in the name of a file or of a folder above it gives its
    split, as on the Hub (`test.jsonl`, `data/train-00000.parquet`). Files without such a word belong to "train"; if
    none has one, all files belong to any split. Python files have no split: `test_parser.py` is a text like any other.

    Args:
        split: name of the split; `train[:10%]` counts as `train`.
    Raises:
        SpeculateError: names give splits, and the requested one is not among them.
    """
    inside = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    shown = [path for path in inside if not any(part.startswith(".") for part in path.parts)]
    found = [path for path in shown if suffix_of(path) in BUILDERS and path.name.lower() not in _ABOUT]
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
    """The suffix that names the format of a file, without that of its compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _split_of(path: Path) -> str | None:
    """The split of a file, by the innermost name that has a word for one."""
    if suffix_of(path) == ".py":
        return None
    for part in reversed(path.parts):
        words = re.split(r"[^a-z]+", part.lower())
        if found := next((_SPLIT_OF[word] for word in words if word in _SPLIT_OF), None):
            return found
    return None
