"""Local folders and Hub repositories of heads and draft models."""

from __future__ import annotations

import os
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from .errors import CheckpointError, DrafterNotFoundError
from .registry import installed_drafters, load_drafter, unknown_drafter_message


_FILES = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.model", "*.txt", "*.jinja"]


def local_folder(
    name_or_path: str | os.PathLike,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    subfolder: str | None = None,
) -> str:
    """The folder of a checkpoint: `name_or_path` itself if it is one, else a (cached) download of that Hub repository.

    Raises:
        DrafterNotFoundError: neither a folder nor a repository that can be had.
    """
    path = os.fspath(name_or_path)
    if not os.path.isdir(path):
        if os.path.exists(path) or path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise DrafterNotFoundError(f"{path!r} is not a folder. A head is a folder or a Hub id 'owner/name'.")
        try:
            path = snapshot_download(
                path,
                revision=revision,
                token=token,
                cache_dir=None if cache_dir is None else os.fspath(cache_dir),
                local_files_only=local_files_only,
                allow_patterns=_FILES,
            )
        except (RepositoryNotFoundError, HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
            raise DrafterNotFoundError(
                f"{unknown_drafter_message(path)} Nor could a Hub repository of that name be had: {error}"
            ) from error
    if subfolder:
        path = os.path.join(path, subfolder)
    return path


def drafter_class_for(folder: str):
    """The installed drafter that recognises the checkpoint in `folder`; raises `CheckpointError` if none does."""
    names = []
    for name in installed_drafters():
        drafter = load_drafter(name)
        if drafter.recognizes(folder):
            return drafter
        names.append(name)
    files: list[Any] = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    raise CheckpointError(f"no installed drafter ({', '.join(names)}) recognises the checkpoint in {folder}: {files}.")
