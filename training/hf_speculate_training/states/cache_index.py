"""The index of a feature cache: what it is of, its shards, their checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hf_speculate.errors import SpeculateError


INDEX_FILE = "cache.json"
_VERSION = 1


class FeatureCacheError(SpeculateError, ValueError):
    """A cache of other states than those that were asked for, an unfinished or a broken one, or a full disk."""


@dataclass(frozen=True)
class CacheKey:
    """What the states are of; a cache is used for nothing else.

    Attributes:
        target: fingerprint of the model, adapters included.
        data: fingerprint of the rows, in order.
        layers: the hidden states.
        dtype: in which they are kept.
    """

    target: str
    data: str
    layers: tuple[int, ...]
    dtype: str


class CacheIndex:
    """`cache.json`: rewritten as a whole after every shard, which appears under its name when it is whole.

    Where several processes write, each notes its shards in a file of its own (`cache-1.json`, …); `gather` takes them
    into `cache.json`, those of a run that was killed included.
    """

    def __init__(self, folder: Path, key: CacheKey, num_rows: int, rows_per_shard: int, shards: dict[str, Any]):
        self.folder, self.key, self.num_rows, self.rows_per_shard = folder, key, num_rows, rows_per_shard
        self._shards = shards
        self._file = INDEX_FILE

    @classmethod
    def open(cls, folder: Path, key: CacheKey, num_rows: int, rows_per_shard: int) -> CacheIndex:
        """The index of a cache that is to be completed, or a new one."""
        if (folder / INDEX_FILE).exists():
            index = cls.read(folder)
            index.check_key(key)
            index.gather()
            return index
        index = cls(folder, key, num_rows, rows_per_shard, {})
        index._save()
        return index

    @classmethod
    def read(cls, folder: Path) -> CacheIndex:
        path = folder / INDEX_FILE
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["version"] != _VERSION:
                raise FeatureCacheError(f"{path} is of version {found['version']}; this program reads {_VERSION}.")
            key = CacheKey(**(found["key"] | {"layers": tuple(found["key"]["layers"])}))
            return cls(folder, key, found["num_rows"], found["rows_per_shard"], found["shards"])
        except FileNotFoundError as error:
            raise FeatureCacheError(f"{folder} holds no feature cache: there is no {INDEX_FILE}.") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, FeatureCacheError):
                raise
            raise FeatureCacheError(f"cannot read the index of a feature cache, {path}: {error!r}") from error

    def of_process(self, number: int) -> CacheIndex:
        """The same for one of several writers."""
        index = CacheIndex(self.folder, self.key, self.num_rows, self.rows_per_shard, dict(self._shards))
        index._file = f"cache-{number}.json"
        return index

    def gather(self) -> None:
        """Takes what several writers noted into `cache.json`."""
        notes = sorted(self.folder.glob("cache-*.json"))
        for path in notes:
            self._shards |= json.loads(path.read_text(encoding="utf-8"))["shards"]
        if notes:
            self._save()
        for path in notes:
            path.unlink()

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.rows_per_shard)

    def shard_name(self, shard: int) -> str:
        return f"features-{shard:05d}.safetensors"

    def check_key(self, key: CacheKey) -> None:
        found, asked = asdict(self.key), asdict(key)
        different = [f"{name} {found[name]!r}, not {asked[name]!r}" for name in asked if found[name] != asked[name]]
        if different:
            raise FeatureCacheError(
                f"the feature cache {self.folder} holds other states than those asked for: it has "
                f"{'; '.join(different)}. Give another folder, or remove this one."
            )

    def has(self, shard: int) -> bool:
        """Whether a shard is there, as large as it was written."""
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
                "shards are complete and stay; make room and run it again to go on."
            ) from error

    def verify(self) -> None:
        for name, known in self._shards.items():
            if _sha256(self.folder / name) != known["sha256"]:
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
