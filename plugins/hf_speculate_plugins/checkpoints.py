"""Reading published checkpoints of heads: which files, safely, and with an account of every key.

Used by `eagle` and `medusa`. Nothing here knows a method: it turns a folder into a config and named tensors
(`read_checkpoint`), or into names and shapes alone (`tensor_shapes`, for `Drafter.recognizes`), and keeps the books
while a method takes what it knows (`KeyAccount`), so that no tensor is dropped or left at its initial value in
silence.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_speculate.errors import CheckpointError


# In order of preference; safetensors before pickles of the same content.
WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
)
# What wrappers leave in front of names: DataParallel / DeepSpeed, a causal LM around the head, torch.compile.
WRAPPERS = ("module.", "model.", "_orig_mod.")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder as it was read.

    Attributes:
        folder: where.
        config: `config.json`, raw (no defaults filled in); empty when there is none.
        tensors: by name, wrapper prefixes stripped, on the CPU, in the dtype of the file. They may be mapped
            from it: copy what is to outlive it.
        files: the weight files that were read, names relative to `folder`.
    """

    folder: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: list[str]


def read_checkpoint(
    folder: str, *, strip: Sequence[str] = WRAPPERS, only: Callable[[str], bool] | None = None
) -> Checkpoint:
    """Reads config and weights of a folder.

    Args:
        folder: a local folder.
        strip: prefixes that are taken off names, repeatedly and in any order. (A full causal LM, as Medusa-2, needs
            its `model.`: pass `("module.", "_orig_mod.")`.)
        only: which tensors to read, by stripped name; None reads all.
    Raises:
        CheckpointError: no weights, truncated or unreadable files, a pickle with anything but tensors in it, names
            that collide after stripping, NaN or infinite weights.
    """
    files = _weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, load in _named_loaders(os.path.join(folder, file)):
            stripped = strip_prefixes(name, strip)
            if only is not None and not only(stripped):
                continue
            if stripped in tensors:
                raise CheckpointError(f"{folder}: two tensors are called {stripped!r} (one of them as {name!r}).")
            tensors[stripped] = load()
    _check_finite(folder, tensors)
    return Checkpoint(folder=folder, config=read_config(folder), tensors=tensors, files=files)


def tensor_shapes(folder: str, *, strip: Sequence[str] = WRAPPERS) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a folder's tensors without reading weights; empty if it has no weight file that we know.

    Raises:
        CheckpointError: files that are there but cannot be read (see `read_checkpoint`).
    """
    if not _known_weight_file(folder):
        return {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder):
        path = os.path.join(folder, file)
        if file.endswith(".safetensors"):
            with _reading(path), safe_open(path, framework="pt") as opened:
                found = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        else:
            found = {name: tuple(tensor.shape) for name, tensor in _load_pickle(path, device="meta").items()}
        shapes.update((strip_prefixes(name, strip), shape) for name, shape in found.items())
    return shapes


def read_tensor(path: str, name: str) -> Tensor:
    """One tensor of a weight file, on the CPU; raises `CheckpointError` if it is not there (see `read_checkpoint`)."""
    for found, load in _named_loaders(path):
        if found == name:
            tensor = load()
            _check_finite(path, {name: tensor})
            return tensor
    raise CheckpointError(f"{path} does not hold {name}.")


def refuse_other_weights(folder: str | os.PathLike, file: str) -> None:
    """Raises `CheckpointError` if `folder` holds weights that readers could take instead of `file`."""
    present = os.listdir(folder) if os.path.isdir(folder) else []
    others = [name for name in WEIGHT_FILES if name in present and name != file]
    if others:
        raise CheckpointError(
            f"{os.fspath(folder)} already holds {', '.join(others)}, which readers could take instead of the {file} "
            "that would be written: delete it, or choose another folder or layout."
        )


def read_config(folder: str) -> dict[str, Any]:
    """`config.json` as it is, or {} when there is none."""
    path = os.path.join(folder, "config.json")
    return _read_json(path) if os.path.exists(path) else {}


def strip_prefixes(name: str, prefixes: Sequence[str]) -> str:
    """`name` without any of `prefixes` in front, however many there are."""
    while found := next((prefix for prefix in prefixes if name.startswith(prefix)), None):
        name = name[len(found) :]
    return name


@dataclass(frozen=True)
class LoadReport:
    """What became of every key of a checkpoint.

    Attributes:
        source: folder and layout, for people.
        used: names that became weights of the drafter.
        shared: name -> why the target's own tensor serves instead.
        ignored: name -> why it is not needed.
        missing: name -> what is used instead of something that the layout allows to be absent.
    """

    source: str
    used: tuple[str, ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.source}: {len(self.used)} tensors used"]
        for title in ("shared", "ignored", "missing"):
            lines += [f"  {title}: {name} ({reason})" for name, reason in getattr(self, title).items()]
        return "\n".join(lines)


class KeyAccount:
    """The books of one load: every tensor is taken, shared or ignored with a reason, or the load fails.

        keys = KeyAccount(checkpoint, "EAGLE-3, SafeAILab layout")
        weight = keys.take("fc.weight", (hidden, None))       # None: any size
        bias = keys.optional("fc.bias", (hidden,))
        keys.share("embed_tokens.weight", "equal to the target's")
        report = keys.finish()

    Problems are collected: `take` of a missing or misshapen tensor returns a placeholder on the meta device and
    `finish` raises one `CheckpointError` that names all of them.
    """

    def __init__(self, checkpoint: Checkpoint, layout: str):
        self._tensors = checkpoint.tensors
        self._source = f"{checkpoint.folder} ({layout})"
        self._used: list[str] = []
        self._shared: dict[str, str] = {}
        self._ignored: dict[str, str] = {}
        self._absent: dict[str, str] = {}
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: Sequence[int | None]) -> Tensor:
        """The tensor `name`, which must be there with this shape (None: any size in that dimension)."""
        tensor = self._tensors.get(name)
        if tensor is None:
            self._missing.append(name)
        else:
            self._used.append(name)
            if _fits(tensor, shape):
                return tensor
            wanted = tuple("any" if size is None else size for size in shape)
            self._misshapen.append(f"{name} has shape {tuple(tensor.shape)}, expected {wanted}")
        return torch.empty([size or 0 for size in shape], device="meta")

    def optional(self, name: str, shape: Sequence[int | None]) -> Tensor | None:
        """As `take`, but None if the tensor is absent."""
        return self.take(name, shape) if name in self else None

    def share(self, name: str, reason: str) -> None:
        """The target's own tensor is used instead of `name` (which may be absent)."""
        self._shared[name] = reason

    def ignore(self, name: str, reason: str) -> None:
        """`name` is known and not needed; nothing happens if it is absent."""
        if name in self:
            self._ignored[name] = reason

    def absent(self, name: str, reason: str) -> None:
        """Notes that `name` is not in the file and what is used instead (an entry of the report, not an error)."""
        self._absent[name] = reason

    def finish(self) -> LoadReport:
        """The report; raises `CheckpointError` naming every missing, misshapen and unknown tensor."""
        known = {*self._used, *self._shared, *self._ignored}
        unknown = [name for name in self._tensors if name not in known]
        problems = [
            f"{title}: {_list(names)}"
            for title, names in (("missing", self._missing), ("wrong", self._misshapen), ("unknown", unknown))
            if names
        ]
        if problems:
            raise CheckpointError(f"{self._source} does not have the tensors of that layout. {'; '.join(problems)}.")
        return LoadReport(self._source, tuple(self._used), self._shared, self._ignored, self._absent)


def _fits(tensor: Tensor, shape: Sequence[int | None]) -> bool:
    return tensor.dim() == len(shape) and all(w is None or w == s for w, s in zip(shape, tensor.shape, strict=True))


def _list(names: Sequence[str], limit: int = 12) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _known_weight_file(folder: str) -> str | None:
    """The preferred weight (or index) file; else the only file that can be one."""
    if not os.path.isdir(folder):
        return None
    names = sorted(os.listdir(folder))
    for name in WEIGHT_FILES:
        if name in names:
            return name
    others = [name for name in names if name.endswith((".safetensors", ".bin", ".pt"))]
    return others[0] if len(others) == 1 else None


def _weight_files(folder: str) -> list[str]:
    """The files that hold the weights, shards of an index in order."""
    name = _known_weight_file(folder)
    if name is None:
        found = sorted(os.listdir(folder)) if os.path.isdir(folder) else "no such folder"
        raise CheckpointError(f"no weights in {folder} (looked for {', '.join(WEIGHT_FILES)}); found: {found}.")
    if not name.endswith(".index.json"):
        return [name]
    weight_map = _read_json(os.path.join(folder, name)).get("weight_map", {})
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not os.path.exists(os.path.join(folder, shard)) or os.path.basename(shard) != shard:
            raise CheckpointError(f"{folder}: {name} names the file {shard!r}, which is not there.")
    return shards


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected an object.")
    return content


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"cannot read {path}, it may be truncated: {error}") from error


def _named_loaders(path: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Name and loader of every tensor in a file, so that unwanted ones are never read."""
    if not path.endswith(".safetensors"):
        for name, tensor in _load_pickle(path).items():
            yield name, lambda tensor=tensor: tensor
        return
    with _reading(path), safe_open(path, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            yield name, lambda name=name: opened.get_tensor(name)


def _load_pickle(path: str, device: str = "cpu") -> dict[str, Tensor]:
    try:
        with _reading(path):
            # Memory mapping works for the zip format only, which all but very old files have.
            mapped = device == "cpu" and zipfile.is_zipfile(path)
            content = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"refused to load {path}: it is a pickle that holds more than tensors (it may run code), or it is broken. "
            "Convert it to safetensors if you trust it."
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} does not hold a plain dictionary of tensors.")
    return content


def _check_finite(folder: str, tensors: Mapping[str, Tensor]) -> None:
    broken = [name for name, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if broken:
        raise CheckpointError(f"{folder}: NaN or infinite weights in {_list(broken)}.")
