"""Files of weights and configs: found in a folder, read as plain tensors and nothing else, and written.

Files come from anywhere. Before a tensor is handed on, it is certain that it shows no more than the file stores, so
that everything made of its shape fits in memory as the file does. A folder becomes a config and named tensors
(`read_checkpoint`), or names and shapes alone (`tensor_shapes`, for `Drafter.recognizes`).
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import (
    check_regular,
    cut,
    file_names,
    json_writer,
    listed,
    open_regular,
    read_json,
    replace_files,
)


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

_GGUF = ".gguf"

# Times that the bytes of one storage may be shown: heads share an output matrix, and there are not many heads.
_MAX_SHARING = 16

Loader = Callable[[], Tensor]


def known_weight_file(folder: str) -> str | None:
    """The preferred weight (or index) file of a folder; else the only file that can be one."""
    names = file_names(folder)
    for name in WEIGHT_FILES:
        if name in names:
            return name
    others = [name for name in names if name.endswith((".safetensors", ".bin", ".pt", _GGUF))]
    return others[0] if len(others) == 1 else None


def _gguf_file(folder: str) -> str | None:
    """The path of the GGUF file that holds the weights: `folder` itself, or the only weights in it; else None."""
    if folder.endswith(_GGUF) and not os.path.isdir(folder):
        return folder
    name = known_weight_file(folder)
    return os.path.join(folder, name) if name and name.endswith(_GGUF) else None


def weight_files(folder: str) -> list[str]:
    """The files that hold the weights, shards of an index in order; raises `CheckpointError` if there are none."""
    name = known_weight_file(folder)
    if name is None:
        listing = file_names(folder) if os.path.isdir(folder) else "no such folder"
        raise CheckpointError(f"no weights in {folder} (looked for {', '.join(WEIGHT_FILES)}); found: {listing}.")
    if not name.endswith(".index.json"):
        return [name]
    shards = sorted(set(read_index(os.path.join(folder, name)).values()))
    for shard in shards:
        if not os.path.exists(os.path.join(folder, shard)):
            raise CheckpointError(f"{folder}: {name} names the file {shard!r}, which is not there.")
    return shards


def checkpoint_files(folder: str) -> list[str]:
    """Names of the files of a checkpoint: its config, its weights, and their index where they have one."""
    if os.path.isfile(folder):
        raise CheckpointError(f"{folder} is a file: put it into a folder of its own, which card and figures belong to.")
    name = known_weight_file(folder)
    return list(dict.fromkeys(["config.json", *([name] if name else []), *weight_files(folder)]))


def read_index(path: str) -> dict[str, str]:
    """The file of each tensor, by name; raises `CheckpointError` for an index that holds anything else."""
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
    folder: str | os.PathLike,
    file: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    **of_gguf: Any,
) -> None:
    """Writes weights and config.json, whole or not at all (see `replace_files`).

    Args:
        file: name of the weights; a pickle where it ends with ".bin" or ".pt", a GGUF file, which holds the config,
            where it ends with ".gguf".
        tensors: weights by name, on any device.
        of_gguf: `vocabulary`, metadata of the target's tokenizer, and `out_type`, type of the matrices.
    Raises:
        CheckpointError: they cannot be written, or there are other weights (see `refuse_other_weights`).
    """
    refuse_other_weights(folder, file)
    if file.endswith(_GGUF):
        from .llamacpp import write_head  # the package for GGUF files is slow to import

        return write_head(folder, file, tensors, config, **of_gguf)
    # Copies with storages of their own: a view would be saved with everything that it is a view of.
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    def write(path: str) -> None:
        if file.endswith(".safetensors"):
            save_file(copies, path, metadata={"format": "pt"})
        else:
            with open(path, "wb") as opened:  # by name, the name would be in the file, and this one is a temporary one
                torch.save(copies, opened)

    replace_files(folder, {file: write, "config.json": json_writer(config)})


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turns everything that safetensors raises for a file into an error about the file."""
    try:
        yield
    except SpeculateError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot read {path}, it may be truncated: {error}") from error


def _load_pickle(path: str, device: str = "cpu") -> dict[str, Tensor]:
    try:
        with open_regular(path) as file:
            is_zip = zipfile.is_zipfile(file)
            size = sum(entry.file_size for entry in zipfile.ZipFile(file).infolist()) if is_zip else 0
            if size > os.fstat(file.fileno()).st_size:  # torch compresses nothing
                raise CheckpointError(f"refused to load {path}: unpacked it is larger than the file.")
        # Memory mapping works for the zip format only, which all but very old files have.
        content = torch.load(path, map_location=device, weights_only=True, mmap=is_zip and device == "cpu")
    except SpeculateError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"refused to load {path}: it is a pickle that holds more than tensors (it may run code), or it is broken. "
            "Convert it to safetensors if you trust it."
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} does not hold a plain dictionary of tensors.")
    if not all(isinstance(name, str) for name in content):
        raise CheckpointError(f"{path} holds tensors whose names are not strings.")
    _check_storages(path, content)
    return content


def _check_storages(path: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuses tensors that together show much more than is stored: a copy of a view takes all that it shows."""
    plain = [t for t in tensors.values() if t.layout == torch.strided]
    stored = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in plain}
    shown = sum(t.numel() * t.element_size() for t in plain)
    if shown > _MAX_SHARING * sum(stored.values()):
        raise CheckpointError(f"{path} shows {shown} bytes of weights, but stores {sum(stored.values())}.")


def _checked(path: str, name: str, tensor: Tensor) -> Tensor:
    """A dense tensor in memory, of a type that heads have; raises `CheckpointError` for any other."""
    name = cut(name)
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
    return cut(repr(value))


# Prefixes that wrappers leave: DataParallel / DeepSpeed, a causal LM around the head, torch.compile.
WRAPPERS = ("module.", "model.", "_orig_mod.")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder as it was read.

    Attributes:
        folder: folder of the files, or the GGUF file.
        config: `config.json`, raw (no defaults filled in); empty when there is none. Of a GGUF file, its metadata under
            the keys that configs have.
        tensors: tensors by name, wrapper prefixes stripped, on the CPU, in the dtype of the file. They may be mapped
            from it: copy a tensor that is to outlive the file.
        files: names of the weight files that were read, relative to `folder`.
        packed: matrices that a GGUF file has in blocks (`hf_speculate_gguf.Matrix`), by name; their values are in
            `tensors`, too.
    """

    folder: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: list[str]
    packed: Mapping[str, Any] = field(default_factory=dict)


def read_checkpoint(
    folder: str, *, strip: Sequence[str] = WRAPPERS, only: Callable[[str], bool] | None = None
) -> Checkpoint:
    """Reads config and weights of a folder.

    Args:
        folder: a local folder, or a GGUF file.
        strip: prefixes that are taken off names, repeatedly and in any order. (A full causal LM like Medusa-2 needs its
            `model.`: pass `("module.", "_orig_mod.")`.)
        only: filter of the tensors to read, by stripped name; None reads all.
    Raises:
        CheckpointError: no weights, truncated or unreadable files, a pickle with anything but tensors in it, names
            that collide after stripping, NaN or infinite weights.
    """
    if path := _gguf_file(folder):
        from .llamacpp import read_head  # the package for GGUF files is slow to import

        config, tensors, packed = read_head(path)
        check_finite(path, tensors)
        return Checkpoint(folder, config, tensors, [os.path.basename(path)], packed)
    files = weight_files(folder)
    tensors = {}
    for file in files:
        for name, load in named_loaders(os.path.join(folder, file)):
            stripped = strip_prefixes(name, strip)
            if only is not None and not only(stripped):
                continue
            if stripped in tensors:
                raise CheckpointError(f"{folder}: two tensors are called {stripped!r} (one of them as {name!r}).")
            tensors[stripped] = load()
    check_finite(folder, tensors)
    return Checkpoint(folder=folder, config=read_config(folder), tensors=tensors, files=files)


def tensor_shapes(folder: str, *, strip: Sequence[str] = WRAPPERS) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a folder's tensors without reading weights; empty if it has no weight file that we know.

    Raises:
        CheckpointError: files that are there but cannot be read (see `read_checkpoint`).
    """
    if path := _gguf_file(folder):
        from .llamacpp import head_shapes  # the package for GGUF files is slow to import

        return head_shapes(path)
    if not known_weight_file(folder):
        return {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        file_shapes = shapes_in(os.path.join(folder, file))
        shapes.update((strip_prefixes(name, strip), shape) for name, shape in file_shapes.items())
    return shapes


def read_named(path: str, names: Collection[str]) -> dict[str, Tensor]:
    """Tensors of a weight file by name, on the CPU; names that it does not hold are left out."""
    tensors = {name: load() for name, load in named_loaders(path) if name in names}
    check_finite(path, tensors)
    return tensors


def read_tensor(path: str, name: str) -> Tensor:
    """One tensor of a weight file, on the CPU; raises `CheckpointError` if it is not there (see `read_checkpoint`)."""
    for stored_name, load in named_loaders(path):
        if stored_name == name:
            tensor = load()
            check_finite(path, {name: tensor})
            return tensor
    raise CheckpointError(f"{path} does not hold {name}.")


def read_config(folder: str) -> dict[str, Any]:
    """`config.json` as it is, or {} when there is none."""
    path = os.path.join(folder, "config.json")
    return read_json(path) if os.path.lexists(path) else {}


def strip_prefixes(name: str, prefixes: Sequence[str]) -> str:
    """`name` without any of `prefixes` in front, however many there are."""
    while matching := next((prefix for prefix in prefixes if name.startswith(prefix)), None):
        name = name[len(matching) :]
    return name
