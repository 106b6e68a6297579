"""The target's hidden states on disk: computed once, read in every epoch, without the target's decoder.

A folder holds `cache.json` (its `CacheKey`) and shards of rows, `features-00000.safetensors`. Their tensors are the
rows one after the other, without padding:

    input_ids, position_ids, document_ids, loss_mask [T], offsets [R + 1]; last_hidden, features.<layer> [T, H]

A shard gets its name when it is whole; a run that was stopped resumes with the next one. Rows are computed in
batches of `batch_size`; a run that reads the same batches online computes the same states, bit by bit, and one with
other batches the same up to rounding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from pydantic import PositiveInt
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from hf_speculate.errors import SpeculateError
from hf_speculate.files import json_writer, read_json, replace_files, user_path
from hf_speculate.messages import get_logger
from hf_speculate.target import GenerativeModel

from ..data import Collator, Row, RowDataset, content_fingerprint, documents_fingerprint
from ..sections import validated
from ..target import target_fingerprint
from .target_states import TargetReader


logger = get_logger(__name__)

INDEX_FILE = "cache.json"
# input_ids, position_ids, document_ids (int64), loss_mask (bool)
_BYTES_OF_ROW_TENSORS = 3 * 8 + 1
_ROW_TENSORS = ("input_ids", "position_ids", "document_ids", "loss_mask")


class FeatureCacheError(SpeculateError, ValueError):
    """A cache holds other states than those that were asked for, is unfinished or broken."""


@dataclass(frozen=True)
class CacheKey:
    """The key of a cache, which is used for nothing else.

    Attributes:
        target: fingerprint of the model, its dtype and adapters included.
        data: fingerprint of the rows, in order.
        layers: layers of the hidden states.
        num_rows: number of rows.
        rows_per_shard: rows of a file.
    """

    target: str
    data: str
    layers: tuple[int, ...]
    num_rows: PositiveInt
    rows_per_shard: PositiveInt

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.rows_per_shard)

    def rows_of(self, shard: int) -> range:
        return range(shard * self.rows_per_shard, min((shard + 1) * self.rows_per_shard, self.num_rows))


def write_features(
    folder: str | os.PathLike,
    reader: TargetReader,
    rows: RowDataset,
    *,
    batch_size: int = 8,
    rows_per_shard: int = 64,
) -> FeatureCache:
    """Computes the states of all rows that the cache lacks, and opens it.

    Processes that train together share the shards out: all of them call this, with one folder for all.

    Args:
        folder: folder of the cache; an absent one is made.
        reader: reader of the target, in whose dtype the states are kept.
        rows: rows of the data.
        batch_size: rows that run together.
        rows_per_shard: rows of a file, best a multiple of `batch_size`.
    Raises:
        FeatureCacheError: the folder holds states of another target, other data or layers.
        CheckpointError: a shard cannot be written. Complete shards stay, and a later run resumes after them.
    """
    path = Path(user_path(folder))
    path.mkdir(parents=True, exist_ok=True)
    key = cache_key(reader, rows, rows_per_shard)
    together = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    rank, count = (distributed.get_rank(), distributed.get_world_size()) if together else (0, 1)
    meet = distributed.barrier if together else lambda: None
    with _locked(path) if rank == 0 else nullcontext():
        if rank == 0 and not (path / INDEX_FILE).exists():
            replace_files(path, {INDEX_FILE: json_writer(asdict(key))})
        meet()
        _check_key(path, key)
        missing = [shard for shard in range(key.num_shards) if not (path / _shard_name(shard)).exists()]
        meet()  # a shard that is written now would be missing for some processes only
        if missing:
            size = sum(rows.lengths) * _token_bytes(reader.target, key.layers)
            logger.warning(f"caching the target's states of {len(rows)} rows: {size / 2**30:.3f} GiB in {path}.")
        for shard in tqdm(missing[rank::count], desc="caching features", unit="shard", disable=rank > 0 or not missing):
            tensors = _states_of(reader, rows, key, shard, batch_size)
            replace_files(path, {_shard_name(shard): lambda place, tensors=tensors: save_file(tensors, place)})
        meet()
    return FeatureCache(path, key)


class FeatureCache(Dataset):
    """Rows with the target's states (`Batch.features` and `Batch.last_hidden`), for a sampler and `Collator`.

    Args:
        folder: folder of a complete cache.
        key: key that the cache must have; None for any.
    Raises:
        FeatureCacheError: the folder is not a cache, or one that has another key, is unfinished or broken.
    """

    def __init__(self, folder: str | os.PathLike, key: CacheKey | None = None):
        self.folder = Path(user_path(folder))
        self.key = _check_key(self.folder, key)
        self._files: dict[int, Any] = {}
        for shard in range(self.key.num_shards):
            self._check_shard(shard)

    def __len__(self) -> int:
        return self.key.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a feature cache of {len(self)} rows.")
        shard, place = divmod(index % len(self), self.key.rows_per_shard)
        if shard not in self._files:
            self._files[shard] = safe_open(self.folder / _shard_name(shard), framework="pt")
        file = self._files[shard]
        start, end = file.get_slice("offsets")[place : place + 2].tolist()
        names = set(file.keys())
        row: dict[str, Any] = {name: file.get_slice(name)[start:end] for name in (*_ROW_TENSORS, "last_hidden")}
        row["features"] = {
            # `last_hidden` is the state after the final norm, which is kept once.
            layer: file.get_slice(f"features.{layer}")[start:end]
            if f"features.{layer}" in names
            else row["last_hidden"]
            for layer in self.key.layers
        }
        return row

    def __getstate__(self) -> dict[str, Any]:
        """The state without open files: workers of a data loader open their own."""
        return {**self.__dict__, "_files": {}}

    def _check_shard(self, shard: int) -> None:
        """Raises `FeatureCacheError` unless a shard is whole and holds its rows; reads its header and offsets."""
        path, num_rows = self.folder / _shard_name(shard), len(self.key.rows_of(shard))
        if not path.exists():
            raise FeatureCacheError(
                f"the feature cache {self.folder} is unfinished: {path.name} is missing. Run write_features again to "
                "resume."
            )
        try:
            with safe_open(path, framework="pt") as file:
                offsets = file.get_tensor("offsets")
                shapes = [file.get_slice(name).get_shape() for name in (*_ROW_TENSORS, "last_hidden")]
        except (SafetensorError, OSError) as error:
            raise FeatureCacheError(f"cannot read {path}: {error}. Remove it and run write_features again.") from error
        if offsets.shape != (num_rows + 1,) or any(shape[:1] != [int(offsets[-1])] for shape in shapes):
            raise FeatureCacheError(f"{path} does not hold {num_rows} rows with states. Remove it and write it again.")


def cache_key(reader: TargetReader, rows: RowDataset, rows_per_shard: int = 64) -> CacheKey:
    """The key of the states of `rows` that `reader` computes."""
    return CacheKey(
        target=target_fingerprint(reader.target),
        data=content_fingerprint([documents_fingerprint(rows.documents), rows.rows]),
        layers=tuple(sorted(reader.feature_layers)),
        num_rows=len(rows),
        rows_per_shard=rows_per_shard,
    )


def feature_bytes(
    folder: str | os.PathLike, target: GenerativeModel, feature_layers: Sequence[int], rows: RowDataset
) -> int:
    """Number of bytes by which a cache in `folder` will still grow; computes no states."""
    held = sum(path.stat().st_size for path in Path(user_path(folder)).glob("*") if path.is_file())
    return max(sum(rows.lengths) * _token_bytes(target, feature_layers) - held, 0)


def _check_key(folder: Path, key: CacheKey | None) -> CacheKey:
    """The key of the cache in `folder`; raises `FeatureCacheError` if there is none, or another one than `key`."""
    try:
        found = validated(CacheKey, read_json(folder / INDEX_FILE), INDEX_FILE)
    except SpeculateError as error:
        raise FeatureCacheError(f"{folder} does not hold a feature cache: {error} Give another folder.") from error
    asked, there = asdict(key or found), asdict(found)
    different = [f"{name} {there[name]!r}, not {asked[name]!r}" for name in asked if there[name] != asked[name]]
    if different:
        raise FeatureCacheError(
            f"the feature cache {folder} holds other states than those asked for: it has {'; '.join(different)}. Give "
            "another folder, or remove this one."
        )
    return found


def _shard_name(shard: int) -> str:
    return f"features-{shard:05d}.safetensors"


def _stored(target: GenerativeModel, layers: Sequence[int]) -> list[str]:
    """Names of the states in a shard. The state after the final norm is `last_hidden`: not kept twice."""
    last = target.config.get_text_config(decoder=True).num_hidden_layers
    return ["last_hidden", *(f"features.{layer}" for layer in layers if layer != last)]


def _token_bytes(target: GenerativeModel, layers: Sequence[int]) -> int:
    hidden_size = target.config.get_text_config(decoder=True).hidden_size
    return len(_stored(target, layers)) * hidden_size * target.dtype.itemsize + _BYTES_OF_ROW_TENSORS


def _states_of(reader: TargetReader, rows: RowDataset, key: CacheKey, shard: int, batch_size: int) -> dict[str, Tensor]:
    """The tensors of a shard."""
    numbers, stored, collate = key.rows_of(shard), _stored(reader.target, key.layers), Collator()
    parts: dict[str, list[Tensor]] = {name: [] for name in (*_ROW_TENSORS, *stored)}
    for start in range(0, len(numbers), batch_size):
        batch_rows: list[Row] = [rows[number] for number in numbers[start : start + batch_size]]
        states = reader(collate(batch_rows))
        named = {"last_hidden": states.last_hidden}
        named |= {f"features.{layer}": value for layer, value in states.features.items()}
        for place, row in enumerate(batch_rows):
            for name in _ROW_TENSORS:
                parts[name].append(row[name])
            for name in stored:
                parts[name].append(named[name][place, : len(row["input_ids"])].to("cpu", reader.target.dtype))
    lengths = torch.tensor([0, *map(len, parts["input_ids"])], dtype=torch.long, device="cpu")
    return {name: torch.cat(values).contiguous() for name, values in parts.items()} | {"offsets": lengths.cumsum(0)}


def _locked(path: Path) -> Any:
    lock = FileLock(path / ".lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout as error:
        raise FeatureCacheError(f"the feature cache {path} is being written by another process.") from error
