"""Folders and Hub repositories of heads and draft models: found and downloaded."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from typing import Any

from huggingface_hub import hf_hub_download, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from ..errors import CheckpointError, DrafterNotFoundError, first_line
from ..files import file_names, listed, read_json, user_path
from .registry import check_local, installed_drafters, load_drafter, unknown_drafter_message


WEIGHTS = (".safetensors", ".bin", ".pt", ".index.json")
_FILES = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.model", "*.txt", "*.jinja"]
_GGUF = ".gguf"
_GGUF_ON_HUB = re.compile(r"([\w-][\w.-]*/[\w.-]+)/(.+\.gguf)")
_DOWNLOAD_ERRORS = (RepositoryNotFoundError, HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError)


def local_folder(
    name_or_path: str | os.PathLike,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    subfolder: str | None = None,
) -> str:
    """The folder of a checkpoint: `name_or_path` itself if it is one, else a (cached) download of that repository.

    A GGUF file is a checkpoint by itself, here or in a repository ("owner/name/file.gguf"); its path is returned.

    Raises:
        DrafterNotFoundError: it is neither a folder, nor a GGUF file, nor a repository that can be downloaded.
    """
    path = user_path(name_or_path)
    cached = None if cache_dir is None else user_path(cache_dir)
    if path.endswith(_GGUF) and os.path.isfile(path):
        return path
    if (match := _GGUF_ON_HUB.fullmatch(path)) and not os.path.exists(path.partition("/")[0]):
        where: dict[str, Any] = {"revision": revision, "token": token, "local_files_only": local_files_only}
        where |= {"cache_dir": cached, "subfolder": subfolder}
        try:
            return hf_hub_download(match[1], match[2], **where)
        except _DOWNLOAD_ERRORS as error:
            raise DrafterNotFoundError(_not_found(path, error, local_files_only)) from error
    if not os.path.isdir(path):
        check_local(path, cached)
        if path in installed_drafters():
            raise DrafterNotFoundError(
                f"{path!r} is the name of a drafter, not a head: AutoSpeculator.from_name({path!r}, target=...)."
            )
        try:
            path = snapshot_download(
                path,
                revision=revision,
                token=token,
                cache_dir=cached,
                local_files_only=local_files_only,
                allow_patterns=_FILES,
            )
        except _DOWNLOAD_ERRORS as error:
            raise DrafterNotFoundError(_not_found(path, error, local_files_only)) from error
    return os.path.join(path, subfolder) if subfolder else path


def head_folder(source: str | os.PathLike, folder: str, target: Any) -> str:
    """`folder`; where it is the target's own, its subfolder `dspark`, where SGLang looks for a target's head."""
    own, inside = getattr(target.config, "_name_or_path", None) or "", os.path.join(folder, "dspark")
    is_own = user_path(source) == own or os.path.realpath(folder) == os.path.realpath(own)
    return inside if own and is_own and os.path.isfile(os.path.join(inside, "config.json")) else folder


def drafter_class_for(folder: str):
    """The installed drafter that recognises the checkpoint in `folder`; raises `CheckpointError` if none does."""
    names = []
    for name in installed_drafters():
        drafter = load_drafter(name)
        if drafter.recognizes(folder):
            return drafter
        names.append(name)
    raise CheckpointError(_not_recognised(folder, names))


def _not_found(name: str, error: Exception, local_files_only: bool) -> str:
    """The message for a name that is not a folder and could not be downloaded from the Hub."""
    if "/" not in name:
        return f"{unknown_drafter_message(name)} There is no folder of that name either."
    message = f"{name!r} is not a folder in {os.getcwd()}, and its repository on the Hub"
    if isinstance(error, RepositoryNotFoundError):
        return f"{message} does not exist, or is private: `hf auth login`, or pass token=."
    if isinstance(error, LocalEntryNotFoundError) and (local_files_only or is_offline_mode()):
        reason = "local_files_only=True" if local_files_only else "HF_HUB_OFFLINE is set"
        return (
            f"{message} is not in the cache and is not requested ({reason}): allow that, or run `hf download {name}` "
            "where there is a network, or give a folder."
        )
    return f"{message} could not be reached: {first_line(error)}"


def _not_recognised(folder: str, names: Sequence[str]) -> str:
    """The message for a folder that no drafter takes: what is missing in it, or what its config names."""
    if folder.endswith(_GGUF):
        return (
            f"no installed drafter ({', '.join(names)}) drafts with the GGUF file {folder}: it is not a head "
            "(architecture 'eagle3' or 'dflash'). A whole model is a draft model: draft_model:model=FILE."
        )
    files = file_names(folder)
    message = f"no installed drafter ({', '.join(names)}) recognises the checkpoint in {folder}"
    if not any(name.endswith(WEIGHTS) for name in files):
        return f"{message}: it has no weights (*.safetensors, *.bin, *.pt); files: {listed(files, 6) or 'none'}."
    if "config.json" not in files:
        return f"{message}: it has no config.json (it has {listed(files, 6)}). Copy it from where the weights are from."
    config = read_json(os.path.join(folder, "config.json"))
    classes = config.get("architectures")
    stated = [config.get("speculators_model_type"), *(classes if isinstance(classes, list) else ())]
    kinds = [kind for kind in (*stated, config.get("model_type")) if isinstance(kind, str)]
    close = [name for kind in kinds for name in difflib.get_close_matches(kind.lower(), names, n=1)]
    hint = f" The nearest is {close[0]!r}, whose tensors it does not have." if close else ""
    kind = f"config.json names {' / '.join(dict.fromkeys(kinds))}" if kinds else "config.json does not name its kind"
    return f"{message}: {kind}, and no drafter knows its tensors.{hint} Files: {listed(files, 6)}."
