"""Files of weights: which ones a folder has, what is in them as plain tensors and nothing else, and writing them.

Files come from anywhere. Before a tensor is handed on, it is certain that it shows no more than the file stores, so
that whatever is made of its shape fits in memory as the file does.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import check_regular, file_names, json_writer, open_regular, read_json, replace_files


# In order of preference; safetensors before pickles of the same content.
WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
)
WEIGHT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ID_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

# How often the bytes of one storage may be shown: heads share an output matrix, and there are not many heads.
_MAX_SHARING = 16

# In front of the bytes of files that are no zip: what wrote them, the dictionary, and names of its storages.
_LEGACY_PICKLES = 5

Loader = Callable[[], Tensor]


def known_weight_file(folder: str) -> str | None:
    """The preferred weight (or index) file of a folder; else the only file that can be one."""
    names = file_names(folder)
    for name in WEIGHT_FILES:
        if name in names:
            return name
    others = [name for name in names if name.endswith((".safetensors", ".bin", ".pt"))]
    return others[0] if len(others) == 1 else None


def weight_files(folder: str) -> list[str]:
    """The files that hold the weights, shards of an index in order; raises `CheckpointError` if there are none."""
    name = known_weight_file(folder)
    if name is None:
        found = file_names(folder) if os.path.isdir(folder) else "no such folder"
        raise CheckpointError(f"no weights in {folder} (looked for {', '.join(WEIGHT_FILES)}); found: {found}.")
    if not name.endswith(".index.json"):
        return [name]
    shards = sorted(set(read_index(os.path.join(folder, name)).values()))
    for shard in shards:
        if not os.path.exists(os.path.join(folder, shard)):
            raise CheckpointError(f"{folder}: {name} names the file {shard!r}, which is not there.")
    return shards


def checkpoint_files(folder: str) -> list[str]:
    """Names of the files of a checkpoint: its config, its weights, and their index where they have one."""
    name = known_weight_file(folder)
    return list(dict.fromkeys(["config.json", *([name] if name else []), *weight_files(folder)]))


def read_index(path: str) -> dict[str, str]:
    """Name of a tensor -> file beside the index; raises `CheckpointError` for anything else in it."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: its weight_map is {_short(weight_map)}, expected names of tensors with files.")
    for shard in weight_map.values():
        is_plain = isinstance(shard, str) and shard.endswith((".safetensors", ".bin", ".pt"))
        if not is_plain or os.path.basename(shard) != shard or "\0" in shard:
            raise CheckpointError(f"{path} names the file {_short(shard)}, expected weights in the same folder.")
    return weight_map


def shapes_in(path: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a file; weights are not read."""
    if not path.endswith(".safetensors"):
        return {name: tuple(tensor.shape) for name, tensor in _load_pickle(path, device="meta").items()}
    check_regular(path)
    with _reading(path), safe_open(path, framework="pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def named_loaders(path: str) -> Iterator[tuple[str, Loader]]:
    """Name and loader of every tensor in a file, so that unwanted ones are never read. What is loaded is checked."""
    if not path.endswith(".safetensors"):
        for name, tensor in _load_pickle(path).items():
            yield name, lambda name=name, tensor=tensor: _checked(path, name, tensor)
        return
    check_regular(path)
    with _reading(path):
        opened = safe_open(path, framework="pt")
    with opened:
        for name in opened.keys():  # noqa: SIM118

            def load(name: str = name) -> Tensor:
                with _reading(path):
                    return _checked(path, name, opened.get_tensor(name))

            yield name, load


def check_finite(where: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises `CheckpointError` for NaN and infinities."""
    broken = [name for name, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if broken:
        raise CheckpointError(f"{where}: NaN or infinite weights in {listed(broken)}.")


def refuse_other_weights(folder: str | os.PathLike, file: str) -> None:
    """Raises `CheckpointError` if `folder` holds weights that readers could take instead of `file`."""
    present = file_names(folder)
    others = [name for name in WEIGHT_FILES if name in present and name != file]
    if others:
        raise CheckpointError(
            f"{os.fspath(folder)} already holds {', '.join(others)}, which readers could take instead of the {file} "
            "that would be written: delete it, or choose another folder or layout."
        )


def write_checkpoint(
    folder: str | os.PathLike, file: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> None:
    """Writes weights and config.json, whole or not at all (see `replace_files`).

    Args:
        file: name of the weights; a pickle where it ends with ".bin" or ".pt".
        tensors: each with a storage of its own: a view would be saved with all of what it is a view of.
    Raises:
        CheckpointError: they cannot be written, or there are other weights (see `refuse_other_weights`).
    """
    refuse_other_weights(folder, file)

    def write(path: str) -> None:
        if file.endswith(".safetensors"):
            save_file(dict(tensors), path, metadata={"format": "pt"})
        else:
            with open(path, "wb") as opened:  # by name, the name would be in the file, and this one is a temporary one
                torch.save(dict(tensors), opened)

    replace_files(folder, {file: write, "config.json": json_writer(config)})


def listed(names: Sequence[str], limit: int = 12) -> str:
    """The first of many names, for messages."""
    more = len(names) - limit
    return ", ".join(map(_cut, names[:limit])) + (f" and {more} more" if more > 0 else "")


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Whatever the libraries raise for a file is about the file."""
    try:
        yield
    except SpeculateError:
        raise
    except pickle.UnpicklingError as error:
        raise _refused(path) from error
    except Exception as error:
        raise CheckpointError(f"cannot read {path}, it may be truncated: {error}") from error


def _refused(path: str) -> CheckpointError:
    return CheckpointError(
        f"refused to load {path}: it is a pickle that holds more than tensors (it may run code), or it is broken. "
        "Convert it to safetensors if you trust it."
    )


def _load_pickle(path: str, device: str = "cpu") -> dict[str, Tensor]:
    with open_regular(path) as file:
        is_zip = zipfile.is_zipfile(file)
        file.seek(0)
        with _reading(path):
            _check_zip(path, file) if is_zip else _check_pickle(path, file, _LEGACY_PICKLES)
    with _reading(path):
        # Memory mapping works for the zip format only, which all but very old files have.
        content = torch.load(path, map_location=device, weights_only=True, mmap=is_zip and device == "cpu")
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} does not hold a plain dictionary of tensors.")
    if not all(isinstance(name, str) for name in content):
        raise CheckpointError(f"{path} holds tensors whose names are no strings.")
    _check_storages(path, content)
    return content


def _check_zip(path: str, file: BinaryIO) -> None:
    """What is unpacked is no larger than the file: torch compresses nothing."""
    with zipfile.ZipFile(file) as archive:
        entries, size = archive.infolist(), os.fstat(file.fileno()).st_size
        if any(e.compress_type != zipfile.ZIP_STORED for e in entries) or sum(e.file_size for e in entries) > size:
            raise CheckpointError(f"refused to load {path}: its entries are compressed, or larger than the file.")
        for entry in entries:
            if entry.filename.endswith("data.pkl"):
                with archive.open(entry) as pickled:
                    _check_pickle(path, pickled)


def _check_pickle(path: str, file: Any, count: int = 1) -> None:
    """Torch takes what these hold for harmless: making a `bytearray` of any length is among that.

    Args:
        count: pickles in a row.
    """
    try:
        for _ in range(count):
            for operation, argument, _ in pickletools.genops(file):
                is_global = operation.name in ("GLOBAL", "STACK_GLOBAL")
                if is_global and not str(argument).startswith(("torch", "collections ")):
                    raise _refused(path)
    except ValueError as error:  # no pickle
        raise error if isinstance(error, SpeculateError) else _refused(path) from error


def _check_storages(path: str, tensors: Mapping[str, Tensor]) -> None:
    """What all tensors show together is not much more than what is stored: copies of views take what they show."""
    plain = [t for t in tensors.values() if t.layout == torch.strided]
    stored = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in plain}
    shown = sum(t.numel() * t.element_size() for t in plain)
    if shown > _MAX_SHARING * sum(stored.values()):
        raise CheckpointError(f"{path} shows {shown} bytes of weights, but stores {sum(stored.values())}.")


def _checked(path: str, name: str, tensor: Tensor) -> Tensor:
    """A dense tensor in memory, of a type that heads have; raises `CheckpointError` for any other."""
    name = _cut(name)
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantised" if tensor.is_quantized else f"{tensor.layout}"
        raise CheckpointError(f"{path}: {name} is a {kind} tensor; dense ones with their values are read.")
    if tensor.dtype not in (*WEIGHT_TYPES, *ID_TYPES):
        possible = ", ".join(str(dtype).removeprefix("torch.") for dtype in WEIGHT_TYPES)
        raise CheckpointError(
            f"{path}: {name} is of type {str(tensor.dtype).removeprefix('torch.')}; weights may be {possible}."
        )
    if not tensor.numel():
        raise CheckpointError(f"{path}: {name} of shape {tuple(tensor.shape)} holds nothing.")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{path}: {name} of shape {tuple(tensor.shape)} repeats the {tensor.untyped_storage().nbytes()} bytes that "
            "are stored: save a copy of it (contiguous())."
        )
    return tensor


def _short(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]} ... ({len(text)} characters)"
