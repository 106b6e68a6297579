"""The records of a source: local files, folders, glob patterns, Hub ids, or a dataset that exists already."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
from datasets import Dataset, DatasetDict, Features, IterableDataset, Value, load_dataset, load_from_disk
from datasets.data_files import DataFilesDict, get_data_patterns
from datasets.exceptions import DatasetGenerationError

from hf_speculate.errors import SpeculateError, first_line

from ..names import BUILDERS, is_data, local_files, suffix_of


Source: TypeAlias = str | os.PathLike | Dataset

_OWN_TEXTS = (".text", ".md", ".py")  # texts that `datasets` does not look for in a folder
# Of files that cannot be read: Arrow's and pandas' errors are ValueErrors.
_ERRORS = (OSError, ValueError, DatasetGenerationError)
_SAVED = ("dataset_info.json", "dataset_dict.json")  # of `save_to_disk`


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
        source: a json, jsonl, parquet, arrow, csv or text file in UTF-8 (compressed too), a glob pattern, a Hub id, a
            folder (as `datasets.load_dataset` reads it, or one that `Dataset.save_to_disk` wrote), or a dataset. A text
            file is one record, `text`: blank lines mean too many things.
        split: split of a Hub id, a saved dataset, or a folder whose files are named after splits.
        config, revision: configuration and revision of a Hub id.
        columns: our name -> the source's name, e.g. `{"prompt": "question", "completion": "answer"}`.
        limit: number of records to read; None for all.
    Raises:
        SpeculateError: nothing there, not readable, no records, no such column, a stream.
    """
    if isinstance(source, IterableDataset):
        raise SpeculateError("the data are a stream, and training packs all of them first: give a Dataset.")
    records = source if isinstance(source, Dataset) else _open(os.fspath(source), split, config, revision)
    if records.format["type"] not in (None, "custom"):  # saved as tensors; a user's transform stays
        records = records.with_format(None)
    name = describe_source(source)
    if len(records) == 0:
        raise SpeculateError(f"the data {name!r} hold no records.")
    records = _renamed(records, columns or {}, name)
    return records if limit is None else records.take(limit)


def describe_source(source: Source) -> str:
    """The name of a source in messages and provenance."""
    if isinstance(source, Dataset):
        return f"Dataset({len(source)} records, fingerprint {source._fingerprint})"
    return os.fspath(source)


def _open(name: str, split: str, config: str | None, revision: str | None) -> Dataset:
    path, files = Path(name).expanduser(), local_files(name)
    try:
        if any((path / index).exists() for index in _SAVED):
            found: Any = load_from_disk(str(path))
        elif files is None:
            found = load_dataset(name, config, split=split, revision=revision)
        else:
            found = _read_files(path, files, split)
        if isinstance(found, Dataset):
            found.data.validate(full=True)  # Arrow reads JSON without a look at its encoding
    except _ERRORS as error:
        raise SpeculateError(_problem(name, files, error)) from error
    if isinstance(found, DatasetDict):
        if split not in found:
            raise SpeculateError(f"the data {name!r} have no split {split!r}; there are: {', '.join(map(str, found))}.")
        found = found[split]
    return found


def _read_files(path: Path, files: list[str], split: str) -> Any:
    suffixes = {suffix_of(Path(file)) for file in files}
    builders = {BUILDERS.get(suffix) for suffix in suffixes}
    builder = builders.pop()
    if builders or builder is None:
        raise SpeculateError(
            f"the data {str(path)!r} are files of the kinds {', '.join(sorted(suffixes))}: give one of "
            f"{', '.join(BUILDERS)} at a time."
        )
    if all(os.path.getsize(file) == 0 for file in files):
        raise SpeculateError(f"the data {str(path)!r} hold no records: nothing but empty files.")
    options: dict[str, Any] = {}
    if builder == "text":
        options = {"sample_by": "document"}
    elif builder == "csv":
        # All cells are texts, as they stand there: 1.10 is not 1.1, and only an empty cell is none.
        header = pd.read_csv(files[0], nrows=0).columns
        options = {"features": Features({str(column): Value("string") for column in header})}
        options |= {"keep_default_na": False, "na_values": [""]}
    by_split, asked = {"train": files}, "train"
    if path.is_dir() and suffixes.isdisjoint(_OWN_TEXTS):
        found = DataFilesDict.from_patterns(get_data_patterns(str(path)), base_path=str(path))
        # `datasets` takes own.jsonl.settings for JSON as well.
        by_split, asked = {name: list(filter(is_data, each)) for name, each in found.items()}, split
    # Names are to be taken literally, not as patterns.
    literal = {name: list(map(glob.escape, each)) for name, each in by_split.items() if each}
    return load_dataset(builder, data_files=literal, split=asked, **options)


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
