"""Hidden states that vLLM wrote for `speculators` 0.9, read as a feature cache; and ours in their layout.

A folder holds one file for each document, `hs_<number>.safetensors`: `token_ids` int64 [S] and `hidden_states` [S, K +
1, H], the K states that a head reads and, last, the one before the final norm (read from `speculators/train/data.py`,
`models/eagle3/core.py` and `hs_connectors/transfer.py`, 0.9.0). The files do not name these states: they are compared
with the target's own. Documents are found by their tokens, in any order.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from hf_speculate.drafting import RAW_LAST
from hf_speculate.files import user_path

from ..data import Batch, RowDataset, make_row
from .cache_index import FeatureCacheError
from .target_states import TargetReader


_PREFIX, _SUFFIX = "hs_", ".safetensors"
_TRIED = 3  # documents that are compared with the target's own states
# Relative distance of equal states that both sides rounded to 16 bits; other layers are far more distant.
_TOLERANCE = 0.1
_FINAL_NORMS = ("norm", "final_layernorm", "norm_f", "ln_f")


def is_foreign(folder: str | os.PathLike) -> bool:
    """True if a folder holds states in this layout."""
    return next(_files(folder), None) is not None


class ForeignFeatures(Dataset):
    """Rows with states that were written elsewhere, in the form of `FeatureCache`.

    Args:
        folder: folder of the files.
        reader: reader of the target, whose decoder runs over three documents to find out which states the files hold.
        rows: rows of the data.
    Raises:
        FeatureCacheError: a file is broken or missing; its states are not the target's, or not those of `reader`.
    """

    def __init__(self, folder: str | os.PathLike, reader: TargetReader, rows: RowDataset):
        self.folder, self._rows = Path(user_path(folder)), rows
        self._paths = _paths_of(rows, _paths_by_tokens(self.folder), self.folder)
        target = reader.target
        self._last = target.config.get_text_config(decoder=True).num_hidden_layers
        self._columns = self._found(reader)
        self._layers, self._dtype = reader.feature_layers, target.dtype
        self._norm = None if self._last in self._columns else _final_norm(target.get_decoder())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = dict(self._rows[index])
        states = torch.cat([_states(self._paths[number]) for number in self._rows.rows[index]]).to(self._dtype)
        features = {layer: states[:, column] for layer, column in self._columns.items()}
        if self._norm is not None:
            with torch.no_grad():
                device = next(self._norm.parameters()).device
                features[self._last] = self._norm(features[RAW_LAST].to(device)).cpu()
        row["last_hidden"] = features[self._last]
        row["features"] = {layer: features[layer] for layer in self._layers}
        return row

    def _found(self, reader: TargetReader) -> dict[int, int]:
        """Column of each hidden state that the files hold."""
        numbers = sorted(self._paths)[:: max(len(self._paths) // _TRIED, 1)][:_TRIED]
        every = TargetReader(reader.target, (*range(self._last + 1), RAW_LAST))
        found: dict[int, int] = {}
        nearest = [_nearest(every, self._rows, number, _states(self._paths[number])) for number in numbers]
        for column, choices in enumerate(zip(*nearest, strict=True)):
            layer, distance = max(choices, key=lambda choice: choice[1])
            if distance > _TOLERANCE or len({layer for layer, _ in choices}) > 1:
                raise FeatureCacheError(
                    f"{self.folder}: state {column} of the files is none of the target's; the nearest is hidden state "
                    f"{layer}, {distance:.0%} off. Another target, or one that was served in another precision."
                )
            found[layer] = column
        wanted = {*reader.feature_layers} - {self._last}
        if not wanted <= found.keys() or not {self._last, RAW_LAST} & found.keys():
            raise FeatureCacheError(
                f"{self.folder}: the files hold the target's hidden states {_listed(found)}; what is trained reads "
                f"{_listed(wanted)} and the last one. Possible: method.head with the layers that are there, or files "
                "with those that are read."
            )
        return found


def write_foreign_features(folder: str | os.PathLike, reader: TargetReader, rows: RowDataset) -> int:
    """Writes the states of all documents of `rows` in their order, and returns their number. Existing files stay.

    Raises:
        FeatureCacheError: a file of that name is of another document, or one cannot be written. Those before are whole.
    """
    path = Path(user_path(folder))
    path.mkdir(parents=True, exist_ok=True)
    layers = (*(layer for layer in reader.feature_layers if layer != RAW_LAST), RAW_LAST)
    every = TargetReader(reader.target, layers)
    for number in tqdm(range(len(rows.documents)), desc="writing features", disable=None):
        file = path / f"{_PREFIX}{number}{_SUFFIX}"
        document = rows.documents[number]
        if file.exists():
            _check_same(file, document)
            continue
        states = every(_batch(document)).features
        tensors = {
            "token_ids": torch.as_tensor(document["input_ids"], dtype=torch.int64),
            "hidden_states": torch.stack([states[layer][0].cpu() for layer in layers], dim=1),
        }
        partial = file.with_name(file.name + ".partial")
        try:
            save_file(tensors, partial)
            partial.replace(file)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise FeatureCacheError(
                f"cannot write {file}: {error}. Free some disk space and run it again to resume."
            ) from error
    return len(rows.documents)


def _check_same(file: Path, document: Mapping[str, Any]) -> None:
    if _tokens_and_shape(file)[0] != _digest(np.asarray(document["input_ids"])):
        raise FeatureCacheError(f"{file} is of another document: write to a folder of its own, or remove its files.")


def _files(folder: str | os.PathLike) -> Iterator[Path]:
    found = Path(user_path(folder)).glob(f"{_PREFIX}*{_SUFFIX}")
    return (path for path in found if path.stem.removeprefix(_PREFIX).isdigit())


def _paths_by_tokens(folder: Path) -> dict[bytes, Path]:
    """All files by the digest of their tokens, which are read."""
    found = {}
    for path in sorted(_files(folder)):
        digest, shape = _tokens_and_shape(path)
        if len(shape) != 3:
            raise FeatureCacheError(f"{path}: hidden_states must be [tokens, states, width], found {shape}.")
        found[digest] = path
    return found


def _tokens_and_shape(path: Path) -> tuple[bytes, list[int]]:
    """Digest of a file's tokens, and the shape of its states."""
    try:
        with safe_open(path, framework="pt") as file:
            return _digest(file.get_tensor("token_ids").numpy()), file.get_slice("hidden_states").get_shape()
    except (OSError, SafetensorError, ValueError) as error:
        raise FeatureCacheError(f"{path} cannot be read ({error}): write it again, or remove it.") from error


def _paths_of(rows: RowDataset, paths: Mapping[bytes, Path], folder: Path) -> dict[int, Path]:
    """Files of all documents that are in rows."""
    wanted = [number for row in rows.rows for number in row]
    found = {number: paths.get(_digest(np.asarray(rows.documents[number]["input_ids"]))) for number in wanted}
    missing = [number for number, path in found.items() if path is None]
    if missing:
        raise FeatureCacheError(
            f"{folder} holds no states of {len(missing)} of {len(wanted)} documents (the first: number {missing[0]}, "
            f"of {len(rows.documents[missing[0]]['input_ids'])} tokens): other data, another tokenizer or template, or "
            "documents that were cut otherwise (data.max_length)."
        )
    return {number: path for number, path in found.items() if path is not None}


def _nearest(reader: TargetReader, rows: RowDataset, number: int, states: Tensor) -> list[tuple[int, float]]:
    """The nearest hidden state of every column of a document's states [S, K, H], with its relative distance."""
    output = reader(_batch(rows.documents[number]))
    own = {layer: value[0].float().cpu() for layer, value in output.features.items()}
    chosen = []
    for column in states.float().unbind(1):
        distances = {layer: float((column - value).norm() / value.norm()) for layer, value in own.items()}
        layer = min(distances, key=distances.__getitem__)
        chosen.append((layer, distances[layer]))
    return chosen


def _batch(document: Mapping[str, Any]) -> Batch:
    return {name: value[None] for name, value in make_row([document]).items()}  # type: ignore[return-value]


def _states(path: Path) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("hidden_states")


def _final_norm(decoder: Any) -> nn.Module:
    name = next((name for name in _FINAL_NORMS if isinstance(getattr(decoder, name, None), nn.Module)), None)
    if name is None:
        raise FeatureCacheError(
            f"the files hold the last state before the final norm, and {type(decoder).__name__} has none by the names "
            f"{', '.join(_FINAL_NORMS)}."
        )
    return getattr(decoder, name)


def _digest(tokens: np.ndarray) -> bytes:
    return hashlib.sha256(tokens.astype(np.int64).tobytes()).digest()


def _listed(layers: Any) -> str:
    return ", ".join(str(layer) if layer != RAW_LAST else "the last one before the norm" for layer in sorted(layers))
