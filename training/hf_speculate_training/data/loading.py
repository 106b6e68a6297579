"""Where data comes from: local files, folders, glob patterns, Hub ids, or a dataset that exists already."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    IterableDatasetDict,
    Value,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError

from hf_speculate.errors import SpeculateError, first_line

from .folders import data_files, suffix_of


Records: TypeAlias = Dataset | IterableDataset
Source: TypeAlias = str | os.PathLike | Records

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
# Of files that cannot be read: Arrow's and pandas' errors are ValueErrors; an empty stream stops at once.
_ERRORS = (OSError, ValueError, DatasetGenerationError, StopIteration)


def load_records(
    source: Source,
    *,
    split: str = "train",
    config: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> Records:
    """The records of a source, as they are.

    Args:
        source: a json, jsonl, parquet, arrow, csv or text file in UTF-8 (compressed too), a folder of them (or one that
            `Dataset.save_to_disk` wrote), a glob pattern, a Hub id, or a dataset. A text file is
            one record, `text`: blank lines mean too many things. Of a folder, see `data_files`.
        split: of Hub ids, saved datasets, and folders whose files are named after splits.
        config, revision: of Hub ids.
        streaming: read on the way instead of converting everything first.
        columns: our name -> the source's name, e.g. `{"prompt": "question", "completion": "answer"}`.
        limit: the first so many records only.
    Raises:
        SpeculateError: nothing there, not readable, no records, no such column.
    """
    records = _plain(
        source if isinstance(source, Dataset | IterableDataset) else _open(source, split, config, revision, streaming)
    )
    name = describe_source(source)
    if isinstance(records, Dataset) and len(records) == 0:
        raise SpeculateError(f"the data {name!r} hold no records.")
    records = _renamed(records, columns or {}, name)
    return records if limit is None else records.take(limit)


def describe_source(source: Source) -> str:
    """How messages and provenance name a source."""
    if isinstance(source, Dataset):
        return f"Dataset({len(source)} records, fingerprint {source._fingerprint})"
    return "IterableDataset" if isinstance(source, IterableDataset) else os.fspath(source)


def _plain(records: Records) -> Records:
    """Records of lists and numbers: others save theirs to be read as tensors. A transform of the user's stays."""
    kind = records.format["type"] if isinstance(records, Dataset) else getattr(records._formatting, "format_type", None)
    return records if kind in (None, "custom") else records.with_format(None)


def _open(source: str | os.PathLike, split: str, config: str | None, revision: str | None, streaming: bool) -> Records:
    name = os.fspath(source)
    files = _local_files(name, split)
    try:
        if files is None:
            found: Any = load_dataset(name, config, split=split, revision=revision, streaming=streaming)
        elif not files:
            found = load_from_disk(os.path.expanduser(name))
        else:
            found = _read_files(name, files, streaming)
        if isinstance(found, Dataset):
            found.data.validate(full=True)  # Arrow reads JSON without a look at its encoding
    except _ERRORS as error:
        raise SpeculateError(_problem(name, files, error)) from error
    if isinstance(found, DatasetDict | IterableDatasetDict):
        if split not in found:
            raise SpeculateError(f"the data {name!r} have no split {split!r}; there are: {', '.join(map(str, found))}.")
        found = found[split]
    return found


def _local_files(name: str, split: str) -> list[str] | None:
    """Files to read; none for a folder that `save_to_disk` wrote; None if the name is not of this machine."""
    path = Path(name).expanduser()
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            return []
        files = data_files(path, split, BUILDERS)
    elif glob.has_magic(name):
        files = sorted(file for file in glob.glob(str(path), recursive=True) if os.path.isfile(file))
    elif name.startswith((".", "/", "~")) or suffix_of(path) in BUILDERS or name.count("/") > 1:
        raise SpeculateError(f"cannot read the data {name!r}: no such file or folder.")
    else:
        return None
    if not files:
        raise SpeculateError(f"no data files in {name!r}; read are {', '.join(BUILDERS)}.")
    return files


def _read_files(name: str, files: list[str], streaming: bool) -> Records:
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
    if streaming:
        arguments = {"name": name, "builder": builder, "files": files, "first": files[0]}
        return IterableDataset.from_generator(_streamed, gen_kwargs=arguments)  # type: ignore[return-value]
    return _load(builder, files, streaming=False)


def _load(builder: str, files: list[str], streaming: bool) -> Any:
    options: dict[str, Any] = {}
    if builder == "text":
        options = {"sample_by": "document"}
    elif builder == "csv":
        # All cells are texts, as they stand there: 1.10 is no 1.1, and only an empty cell is none.
        header = pd.read_csv(files[0], nrows=0).columns
        options = {"features": Features({str(column): Value("string") for column in header})}
        options |= {"keep_default_na": False, "na_values": [""]}
    literal = [glob.escape(file) for file in files]  # `datasets` takes names for patterns
    return load_dataset(builder, data_files=literal, split="train", streaming=streaming, **options)


def _streamed(name: str, builder: str, files: list[str], first: str) -> Iterator[dict[str, Any]]:
    """The records of files, one file after the other; what is wrong with one is found on the way.

    Args:
        files: some of the source's: processes share them out.
        first: the source's first file, which says what columns all of them have.
    """
    try:
        columns = set(next(iter(_load(builder, [first], streaming=True)), {}))
        for file in files:
            for place, record in enumerate(_load(builder, [file], streaming=True)):
                if place == 0 and columns and set(record) != columns:
                    listed = ", ".join(sorted(columns.symmetric_difference(record)))
                    raise ValueError(f"{file} has other columns than {first} ({listed}); they must be the same")
                yield record
    except _ERRORS as error:
        raise SpeculateError(_problem(name, files, error)) from error


def _renamed(records: Records, columns: Mapping[str, str], name: str) -> Records:
    if not columns:
        return records
    found = records.column_names or list(next(iter(records), {}))
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
