"""Where data comes from: local files, folders, glob patterns, Hub ids, or a dataset that exists already."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from hf_speculate.errors import SpeculateError


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
_COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")


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
        source: a json, jsonl, parquet, arrow, csv or text file (compressed too), a folder of them (or one that
            `Dataset.save_to_disk` wrote), a glob pattern, a Hub id, or a dataset. A text file is
            one record, `text`: blank lines mean too many things.
        split, config, revision: of Hub ids and saved datasets.
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
    files = _local_files(name)
    try:
        if files is None:
            found: Any = load_dataset(name, config, split=split, revision=revision, streaming=streaming)
        elif not files:
            found = load_from_disk(os.path.expanduser(name))
        else:
            found = _read_files(name, files, streaming)
    except (OSError, ValueError, DatasetGenerationError, StopIteration) as error:
        raise SpeculateError(_problem(name, files, error)) from error
    if isinstance(found, DatasetDict | IterableDatasetDict):
        if split not in found:
            raise SpeculateError(f"the data {name!r} have no split {split!r}; there are: {', '.join(map(str, found))}.")
        found = found[split]
    return found


def _local_files(name: str) -> list[str] | None:
    """Files to read; none for a folder that `save_to_disk` wrote; None if the name is not of this machine."""
    path = Path(name).expanduser()
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            return []
        files = sorted(str(file) for file in path.rglob("*") if file.is_file() and _suffix(file) in BUILDERS)
    elif glob.has_magic(name):
        files = sorted(file for file in glob.glob(str(path), recursive=True) if os.path.isfile(file))
    elif name.startswith((".", "/", "~")) or _suffix(path) in BUILDERS or name.count("/") > 1:
        raise SpeculateError(f"cannot read the data {name!r}: no such file or folder.")
    else:
        return None
    if not files:
        raise SpeculateError(f"no data files in {name!r}; read are {', '.join(BUILDERS)}.")
    return files


def _read_files(name: str, files: list[str], streaming: bool) -> Records:
    suffixes = {_suffix(Path(file)) for file in files}
    builders = {BUILDERS.get(suffix) for suffix in suffixes}
    if len(builders) > 1 or None in builders:
        raise SpeculateError(
            f"the data {name!r} are files of the kinds {', '.join(sorted(suffixes))}: give one of "
            f"{', '.join(BUILDERS)} at a time."
        )
    builder = builders.pop()
    if all(os.path.getsize(file) == 0 for file in files):
        raise SpeculateError(f"the data {name!r} hold no records: nothing but empty files.")
    options = {"sample_by": "document"} if builder == "text" else {}
    return load_dataset(builder, data_files=files, split="train", streaming=streaming, **options)  # type: ignore


def _suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _renamed(records: Records, columns: Mapping[str, str], name: str) -> Records:
    found = records.column_names
    missing = [column for column in columns.values() if found is not None and column not in found]
    if missing:
        raise SpeculateError(f"the data {name!r} have no column {missing[0]!r}; there are: {', '.join(found or [])}.")
    kept = [column for column in columns if found is not None and column in found and column not in columns.values()]
    records = records.remove_columns(kept) if kept else records
    return records.rename_columns({theirs: ours for ours, theirs in columns.items() if theirs != ours})


def _problem(name: str, files: list[str] | None, error: BaseException) -> str:
    cause = error.__cause__ or error
    line = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    if files is None:
        return f"cannot read the data {name!r}: it is neither a file or folder here nor readable from the Hub ({line})."
    together = f" ({len(files)} files, read as one table: their columns must be the same)" if len(files) > 1 else ""
    return f"cannot read the data {name!r}{together}: {line}"
