"""Finds the files of a model: on the disk or the Hub, whole or in parts as llama.cpp's `gguf-split` makes them."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

from transformers.utils.hub import cached_file

from hf_speculate.errors import CheckpointError
from hf_speculate.files import file_names, listed, user_path

from .metadata import Metadata
from .named import NAMED_TARGETS, named_file
from .reading import GgufFile, read_header


_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_NO, _COUNT, _NUM_TENSORS = "split.no", "split.count", "split.tensors.count"


def part_names(name: str) -> list[str]:
    """The names of all parts of the model that a file of this name is a part of; its own name if it is not a part."""
    match = _PART.search(name)
    if match is None:
        return [name]
    return [f"{name[: match.start()]}-{i:05d}-of-{match[2]}.gguf" for i in range(1, int(match[2]) + 1)]


def find_file(path_or_repo: str | os.PathLike[str], gguf_file: str | None, hub_kwargs: dict[str, Any]) -> str:
    """The path of a model's file, or of its first part; all parts are downloaded if need be.

    Args:
        path_or_repo: a file; or a folder or Hub repository that holds `gguf_file`; or the name of one.
        gguf_file: name of the file in a folder or repository.
        hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only` ...
    Raises:
        CheckpointError: there is no such file.
    """
    path = user_path(path_or_repo)
    if gguf_file is None:
        if os.path.isfile(path):
            return path
        if named := named_file(path):
            return named
        raise CheckpointError(f"{path!r} is {_without_file(path)}")
    files = []
    for name in part_names(gguf_file):
        try:
            files.append(cached_file(path, name, **hub_kwargs))
        except OSError as error:
            raise CheckpointError(f"{name!r} of {path!r} cannot be had: {error}") from error
    assert files[0] is not None
    return files[0]


def _without_file(path: str) -> str:
    """The message for a path that is not a file, and was given without `gguf_file`."""
    if not os.path.isdir(path):
        return (
            f"no file: there is no {os.path.abspath(path)}. A Hub repository takes `gguf_file=`; possible names are "
            f"{', '.join(map(repr, NAMED_TARGETS))}."
        )
    if files := [name for name in file_names(path) if name.endswith(".gguf")]:
        return f"a folder: name the file in it with `gguf_file=`, one of {listed(files, 6)}."
    return "a folder without a GGUF file. AutoModelForCausalLM.from_pretrained loads models in safetensors."


def read_model_file(path: str | os.PathLike[str]) -> GgufFile:
    """The header of a model's file, with the tensors of all its parts, which must be in the same folder.

    Args:
        path: the file, or the first of its parts.

    Raises:
        CheckpointError: see `read_header`; or the part is not the first one, or one is missing or of another model.
    """
    first = read_header(path)
    reader = Metadata(first)
    count = reader.get(_COUNT, int, 0)
    if count <= 1:
        return first
    names = part_names(first.path)
    if reader.get(_NO, int, 0) != 0:
        raise CheckpointError(f"{first.path!r} is one of {count} parts of a model: load the first, {names[0]!r}.")
    if len(names) != count:
        raise CheckpointError(
            f"{first.path!r} is the first of {count} parts: it and the others are found as 'NAME-00001-of-{count:05d}"
            ".gguf' and so on, and it is called otherwise."
        )
    others = []
    for number, name in enumerate(names[1:], start=1):
        if not os.path.isfile(name):
            raise CheckpointError(f"{name!r} is missing: the model in {first.path!r} has {count} parts.")
        part = read_header(name)
        place = part.metadata.get(_NO), part.metadata.get(_COUNT)
        if place != (number, count):
            raise CheckpointError(
                f"{name!r} is part {place[0]!r} of {place[1]!r} by its metadata, not {number} of {count}."
            )
        others.append(part)
    return _joined(first, others, reader.get(_NUM_TENSORS, int))


def _joined(first: GgufFile, others: list[GgufFile], num_tensors: int) -> GgufFile:
    tensors = dict(first.tensors)
    for part in others:
        if twice := tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{part.path!r}: tensor {min(twice)!r} is in an earlier part too.")
        tensors |= part.tensors
    if len(tensors) != num_tensors:
        raise CheckpointError(f"{first.path!r}: {num_tensors} tensors are announced, {len(tensors)} are in its parts.")
    return replace(first, tensors=tensors, others=tuple(others))
