"""The target's hidden states on disk: computed once, read in every epoch, without the target's decoder.

A folder holds `cache.json` (what it was made from, the shards and their checksums) and shards of rows,
`features-00000.safetensors`, whose tensors are the rows one after the other, without padding:

    input_ids, position_ids, document_ids, loss_mask [T], offsets [R + 1]; last_hidden, features.<layer> [T, H]

A shard appears under its name when it is whole; a run that was stopped resumes with the next one. Rows are computed in
batches of `batch_size`; a run that reads the same batches online computes the same states, bit by bit, and one with
other batches the same up to rounding.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from torch import Tensor, distributed
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from hf_speculate.files import user_path
from hf_speculate.messages import get_logger
from hf_speculate.models import GenerativeModel

from ..data import Collator, Row, RowDataset, content_fingerprint, documents_fingerprint
from ..target import target_fingerprint
from .cache_index import CacheIndex, CacheKey, FeatureCacheError
from .target_states import TargetReader


logger = get_logger(__name__)

# input_ids, position_ids, document_ids (int64), loss_mask (bool)
_BYTES_OF_ROW_TENSORS = 3 * 8 + 1
_ROW_TENSORS = ("input_ids", "position_ids", "document_ids", "loss_mask")


@dataclass(frozen=True)
class _Plan:
    """The rows of each shard, and their size."""

    key: CacheKey
    lengths: Sequence[int]
    rows_per_shard: int
    stored: tuple[str, ...]
    hidden_size: int

    @property
    def num_shards(self) -> int:
        return -(-len(self.lengths) // self.rows_per_shard)

    def rows_of(self, shard: int) -> range:
        return range(shard * self.rows_per_shard, min((shard + 1) * self.rows_per_shard, len(self.lengths)))

    def num_bytes(self, shards: Sequence[int]) -> int:
        item = torch.empty((), dtype=getattr(torch, self.key.dtype)).element_size()
        token = len(self.stored) * self.hidden_size * item + _BYTES_OF_ROW_TENSORS
        return sum(self.lengths[row] for shard in shards for row in self.rows_of(shard)) * token


def write_features(
    folder: str | os.PathLike,
    reader: TargetReader,
    rows: RowDataset,
    *,
    dtype: torch.dtype | None = None,
    batch_size: int = 8,
    rows_per_shard: int = 64,
) -> FeatureCache:
    """Computes the states of all rows that the cache lacks, and opens it.

    Processes that train together share the shards out: all of them call this, with one folder for all.

    Args:
        folder: folder of the cache; an absent one is made.
        reader: reader of the target.
        rows: rows of the data.
        dtype: data type of the files; None for the target's. Others round.
        batch_size: rows that run together.
        rows_per_shard: rows of a file, best a multiple of `batch_size`.
    Raises:
        FeatureCacheError: the folder holds states of another target, other data or layers; the disk is too small or got
            full. Complete shards stay, and a later run resumes after them.
    """
    path = Path(user_path(folder))
    path.mkdir(parents=True, exist_ok=True)
    key = cache_key(reader, rows, dtype)
    rank, _ = _process()
    with _locked(path) if rank == 0 else nullcontext():
        if rank == 0:
            CacheIndex.open(path, key, len(rows), rows_per_shard)
        _meet()
        index = CacheIndex.read(path)
        index.check_key(key)
        _write_missing(index, reader, rows, batch_size)
        _meet()
        if rank == 0:
            index.gather()
        _meet()
    return FeatureCache(path, key)


class FeatureCache(Dataset):
    """Rows with the target's states (`Batch.features` and `Batch.last_hidden`), for a sampler and `Collator`.

    Args:
        folder: folder of a complete cache.
        key: key that the cache must have; None for any.
        verify: True compares every shard with its checksum, which reads all of it.
    Raises:
        FeatureCacheError: the folder is not a cache, or one that has another key, is unfinished or broken.
    """

    def __init__(self, folder: str | os.PathLike, key: CacheKey | None = None, *, verify: bool = True):
        self.folder = Path(user_path(folder))
        self._index = index = CacheIndex.read(self.folder)
        if key is not None:
            index.check_key(key)
        self.key = index.key
        missing = [shard for shard in range(index.num_shards) if not index.has(shard)]
        if missing:
            raise FeatureCacheError(
                f"the feature cache {self.folder} is unfinished: {len(missing)} of {index.num_shards} shards are "
                f"missing (the first: {index.shard_name(missing[0])}). Run write_features again to resume."
            )
        if verify:
            index.verify()
        self._num_rows, self._rows_per_shard = index.num_rows, index.rows_per_shard
        self._files: dict[int, Any] = {}
        for shard in range(index.num_shards):
            self._check_shard(shard)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a feature cache of {len(self)} rows.")
        shard, place = divmod(index % len(self), self._rows_per_shard)
        file = self._file(shard)
        start, end = file.get_slice("offsets")[place : place + 2].tolist()
        row: dict[str, Any] = {name: file.get_slice(name)[start:end] for name in _ROW_TENSORS}
        row["last_hidden"] = file.get_slice("last_hidden")[start:end]
        names = set(file.keys())
        row["features"] = {
            # `last_hidden` is the state after the final norm, which is kept once.
            layer: file.get_slice(f"features.{layer}")[start:end]
            if f"features.{layer}" in names
            else row["last_hidden"]
            for layer in self.key.layers
        }
        return row

    def _check_shard(self, shard: int) -> None:
        """Raises `FeatureCacheError` unless a shard holds its rows, which its checksum cannot show."""
        path, first = self.folder / self._index.shard_name(shard), shard * self._rows_per_shard
        num_rows = min(self._rows_per_shard, self._num_rows - first)
        try:
            with safe_open(path, framework="pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                lengths = {shape[0] if shape else 0 for name, shape in shapes.items() if name != "offsets"}
                offsets = file.get_tensor("offsets").tolist() if shapes.get("offsets") == (num_rows + 1,) else []
        except (SafetensorError, OSError) as error:
            raise FeatureCacheError(f"cannot read {path}: {error}") from error
        is_right = lengths == {offsets[-1]} and offsets[0] == 0 and offsets == sorted(offsets) if offsets else False
        if not is_right or any(name not in shapes for name in (*_ROW_TENSORS, "last_hidden")):
            raise FeatureCacheError(f"{path} does not hold {num_rows} rows with states. Remove it and write it again.")

    def __getstate__(self) -> dict[str, Any]:
        """The state without open files: workers of a data loader open their own."""
        return {**self.__dict__, "_files": {}}

    def _file(self, shard: int) -> Any:
        if shard not in self._files:
            self._files[shard] = safe_open(self.folder / self._index.shard_name(shard), framework="pt")
        return self._files[shard]


def cache_key(reader: TargetReader, rows: RowDataset, dtype: torch.dtype | None = None) -> CacheKey:
    """The key of the states of `rows` that `reader` computes."""
    return CacheKey(
        target=target_fingerprint(reader.target),
        data=content_fingerprint([documents_fingerprint(rows.documents), rows.rows]),
        layers=tuple(sorted(reader.feature_layers)),
        dtype=str(dtype or reader.target.dtype).removeprefix("torch."),
    )


def feature_bytes(
    folder: str | os.PathLike, target: GenerativeModel, feature_layers: Sequence[int], rows: RowDataset
) -> int:
    """Number of bytes by which a cache in `folder` will still grow; computes no states."""
    key = CacheKey("", "", tuple(sorted(feature_layers)), str(target.dtype).removeprefix("torch."))
    plan = _plan(key, target, rows, rows_per_shard=1)
    held = sum(path.stat().st_size for path in Path(user_path(folder)).glob("*") if path.is_file())
    return max(plan.num_bytes(range(plan.num_shards)) - held, 0)


def _plan(key: CacheKey, target: GenerativeModel, rows: RowDataset, rows_per_shard: int) -> _Plan:
    config = target.config.get_text_config(decoder=True)
    # The state after the final norm is `last_hidden`: not kept twice.
    stored = ("last_hidden", *(f"features.{layer}" for layer in key.layers if layer != config.num_hidden_layers))
    lengths = [rows.row_length(row) for row in range(len(rows))]
    return _Plan(key, lengths, rows_per_shard, stored, config.hidden_size)


def _write_missing(index: CacheIndex, reader: TargetReader, rows: RowDataset, batch_size: int) -> None:
    """Writes this process' share of the missing shards."""
    plan = _plan(index.key, reader.target, rows, index.rows_per_shard)
    missing = [shard for shard in range(plan.num_shards) if not index.has(shard)]
    if not missing:
        return
    rank, count = _process()
    _check_space(index.folder, plan, missing)
    writer = index if count == 1 else index.of_process(rank)
    for shard in tqdm(missing[rank::count], desc="caching features", unit="shard", disable=True if rank else None):
        writer.add(shard, _states_of(reader, rows, plan, shard, batch_size))


def _process() -> tuple[int, int]:
    """Index of this process among those that train together, and their number."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _meet() -> None:
    """Waits for all processes."""
    if _process()[1] > 1:
        distributed.barrier()


def _check_space(path: Path, plan: _Plan, missing: Sequence[int]) -> None:
    needed, free = plan.num_bytes(missing), shutil.disk_usage(path).free
    total = plan.num_bytes(range(plan.num_shards))
    logger.warning(
        f"caching the target's states of {len(plan.lengths)} rows, {sum(plan.lengths)} tokens: {_size(total)} in "
        f"{path} ({_size(needed)} to be written, {_size(free)} free)."
    )
    if needed > free:
        raise FeatureCacheError(
            f"the feature cache needs {_size(needed)} more, but the disk of {path} has {_size(free)} free. Possible: "
            "another folder, fewer data, dtype=torch.bfloat16, or features computed online."
        )


def _states_of(reader: TargetReader, rows: RowDataset, plan: _Plan, shard: int, batch_size: int) -> dict[str, Tensor]:
    """The tensors of a shard."""
    numbers, collate, dtype = plan.rows_of(shard), Collator(), getattr(torch, plan.key.dtype)
    parts: dict[str, list[Tensor]] = {name: [] for name in (*_ROW_TENSORS, *plan.stored)}
    offsets = [0]
    for start in range(0, len(numbers), batch_size):
        batch_rows: list[Row] = [rows[number] for number in numbers[start : start + batch_size]]
        states = reader(collate(batch_rows))
        named = {"last_hidden": states.last_hidden}
        named |= {f"features.{layer}": value for layer, value in states.features.items()}
        for place, row in enumerate(batch_rows):
            length = len(row["input_ids"])
            offsets.append(offsets[-1] + length)
            for name in _ROW_TENSORS:
                parts[name].append(row[name])
            for name in plan.stored:
                parts[name].append(named[name][place, :length].to(device="cpu", dtype=dtype))
    tensors = {name: torch.cat(values).contiguous() for name, values in parts.items()}
    return tensors | {"offsets": torch.tensor(offsets)}


def _locked(path: Path) -> Any:
    lock = FileLock(path / ".lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout as error:
        raise FeatureCacheError(f"the feature cache {path} is being written by another process.") from error


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
