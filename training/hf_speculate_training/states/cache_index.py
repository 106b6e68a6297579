"""The index of a feature cache: its key, its shards, their checksums."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import check_kinds, read_json, section


INDEX_FILE = "cache.json"
_VERSION = 1
_KINDS: dict[str, Any] = {
    "version": int,
    "key": dict,
    "key.target": str,
    "key.data": str,
    "key.layers": list,
    "key.dtype": str,
    "num_rows": int,
    "rows_per_shard": int,
    "shards": dict,
}
_SHARD_KINDS: dict[str, Any] = {"bytes": int, "sha256": str}
# Bounds above any cache, since shards are counted one by one.
_MOST_ROWS, _MOST_SHARDS = 1 << 32, 1 << 22


class FeatureCacheError(SpeculateError, ValueError):
    """A cache holds other states than those that were asked for, is unfinished or broken, or the disk is full."""


@dataclass(frozen=True)
class CacheKey:
    """The key of a cache, which is used for nothing else.

    Attributes:
        target: fingerprint of the model, adapters included.
        data: fingerprint of the rows, in order.
        layers: layers of the hidden states.
        dtype: data type of the files.
    """

    target: str
    data: str
    layers: tuple[int, ...]
    dtype: str


class CacheIndex:
    """The file `cache.json`, rewritten as a whole after every shard. A shard appears under its name when it is whole.

    Each of several writing processes notes its shards in a file of its own (`cache-1.json`, …). `gather` takes these
    notes into `cache.json`, also those of a killed run.
    """

    def __init__(self, folder: Path, key: CacheKey, num_rows: int, rows_per_shard: int, shards: dict[str, Any]):
        self.folder, self.key, self.num_rows, self.rows_per_shard = folder, key, num_rows, rows_per_shard
        self._shards = shards
        self._file = INDEX_FILE

    @classmethod
    def open(cls, folder: Path, key: CacheKey, num_rows: int, rows_per_shard: int) -> CacheIndex:
        """The index of a cache to complete, or of a new one."""
        if (folder / INDEX_FILE).exists():
            index = cls.read(folder)
            index.check_key(key)
            if index.num_rows != num_rows:
                raise _broken(folder / INDEX_FILE, f"num_rows is {index.num_rows}, and the data have {num_rows}")
            index.gather()
            return index
        index = cls(folder, key, num_rows, rows_per_shard, {})
        index._save()
        return index

    @classmethod
    def read(cls, folder: Path) -> CacheIndex:
        path = folder / INDEX_FILE
        if not os.path.lexists(path):
            raise FeatureCacheError(f"{folder} holds no feature cache: there is no {INDEX_FILE}.")
        return cls(folder, *_read_index(path))

    def of_process(self, number: int) -> CacheIndex:
        """The index of one of several writers."""
        index = CacheIndex(self.folder, self.key, self.num_rows, self.rows_per_shard, dict(self._shards))
        index._file = f"cache-{number}.json"
        return index

    def gather(self) -> None:
        """Takes the notes of several writers into `cache.json`."""
        notes = sorted(self.folder.glob("cache-*.json"))
        for path in notes:
            if (found := _read_index(path))[:3] != (self.key, self.num_rows, self.rows_per_shard):
                raise FeatureCacheError(
                    f"{path} is not a note of a writer of this cache: it is of other states. Remove it and run "
                    "write_features again; complete shards stay."
                )
            self._shards |= found[3]
        if notes:
            self._save()
        for path in notes:
            path.unlink()

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.rows_per_shard)

    def shard_name(self, shard: int) -> str:
        return _shard_name(shard)

    def check_key(self, key: CacheKey) -> None:
        found, asked = asdict(self.key), asdict(key)
        different = [f"{name} {found[name]!r}, not {asked[name]!r}" for name in asked if found[name] != asked[name]]
        if different:
            raise FeatureCacheError(
                f"the feature cache {self.folder} holds other states than those asked for: it has "
                f"{'; '.join(different)}. Give another folder, or remove this one."
            )

    def has(self, shard: int) -> bool:
        """True if a shard is there, as large as it was written."""
        name = self.shard_name(shard)
        known, path = self._shards.get(name), self.folder / name
        return known is not None and path.is_file() and path.stat().st_size == known["bytes"]

    def add(self, shard: int, tensors: dict[str, Tensor]) -> None:
        """Writes a shard and notes it."""
        path = self.folder / self.shard_name(shard)
        partial = path.with_name(path.name + ".partial")
        try:
            save_file(tensors, partial)
            _sync(partial)
            entry = {"bytes": partial.stat().st_size, "sha256": _sha256(partial)}
            partial.replace(path)
            self._shards[path.name] = entry
            self._save()
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise FeatureCacheError(
                f"cannot write {path}: {error}. {sum(map(self.has, range(self.num_shards)))} of {self.num_shards} "
                "shards are complete and stay; free some disk space and run it again to resume."
            ) from error

    def verify(self) -> None:
        """Compares every shard with its checksum."""
        for name, known in self._shards.items():
            try:
                digest = _sha256(self.folder / name)
            except OSError as error:
                raise FeatureCacheError(f"cannot read {self.folder / name}: {error}") from error
            if digest != known["sha256"]:
                raise FeatureCacheError(
                    f"{self.folder / name} does not have the checksum that {INDEX_FILE} notes: the file was damaged. "
                    "Remove it and run write_features again; the other shards stay."
                )

    def _save(self) -> None:
        content = {
            "version": _VERSION,
            "key": asdict(self.key),
            "num_rows": self.num_rows,
            "rows_per_shard": self.rows_per_shard,
            "shards": self._shards,
        }
        partial = self.folder / f"{self._file}.partial"
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        _sync(partial)
        partial.replace(self.folder / self._file)


def _read_index(path: Path) -> tuple[CacheKey, int, int, dict[str, Any]]:
    """Key, number of rows, rows of a shard, and the entries of shards by file name.

    Raises:
        FeatureCacheError: the file is not an index, or one of another version.
    """
    try:
        found = read_json(path)
        if found.get("version") not in (None, _VERSION):
            raise FeatureCacheError(f"{path} is of version {found['version']}; this program reads {_VERSION}.")
        check_kinds(path, found, _KINDS)
        if absent := [name for name in _KINDS if _absent(found, name)]:
            raise _broken(path, f"{absent[0]} is not there")
        layers, num_rows, per_shard = found["key"]["layers"], found["num_rows"], found["rows_per_shard"]
        if set(found["key"]) != {"target", "data", "layers", "dtype"} or not all(type(each) is int for each in layers):
            raise _broken(path, "its key is not target, data, layers and dtype")
        in_range = 1 <= num_rows <= _MOST_ROWS and 1 <= per_shard <= _MOST_ROWS
        if not in_range or -(-num_rows // per_shard) > _MOST_SHARDS:
            raise _broken(path, f"num_rows is {num_rows} and rows_per_shard {per_shard}, which no cache has")
        _check_shards(path, found["shards"], -(-num_rows // per_shard))
    except CheckpointError as error:
        raise _broken(path, str(error)) from error
    return CacheKey(**(found["key"] | {"layers": tuple(layers)})), num_rows, per_shard, found["shards"]


def _check_shards(path: Path, shards: dict[str, Any], count: int) -> None:
    """Refuses entries that are not shards of this cache: files are opened by the names in the index."""
    for name, entry in shards.items():
        number = re.fullmatch(r"features-(\d{5,9})\.safetensors", name)
        if number is None or name != _shard_name(int(number[1])) or int(number[1]) >= count:
            raise _broken(path, f"it names {name[:80]!r}, which is none of its {count} shards")
        if not isinstance(entry, dict) or any(entry.get(each) is None for each in _SHARD_KINDS):
            raise _broken(path, f"its entry for {name} does not have bytes and sha256")
        check_kinds(path, entry, _SHARD_KINDS)


def _absent(found: dict[str, Any], name: str) -> bool:
    *sections, last = name.split(".")
    return section(found, *sections).get(last) is None


def _broken(path: Path, why: str) -> FeatureCacheError:
    return FeatureCacheError(
        f"cannot read the index of a feature cache, {path}: {why.rstrip('.')}. Remove the folder and write it again."
    )


def _shard_name(shard: int) -> str:
    return f"features-{shard:05d}.safetensors"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(1 << 20):
        yield block


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
