"""Local folders and Hub repositories of heads and draft models."""

from __future__ import annotations

import os
from typing import Any

from huggingface_hub import CommitInfo, HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from ..errors import CheckpointError, DrafterNotFoundError
from ..registry import installed_drafters, load_drafter, unknown_drafter_message
from .card import CARD_FILE, is_generated


_WEIGHTS = (".safetensors", ".bin", ".pt", ".index.json")
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
        if path in installed_drafters():
            raise DrafterNotFoundError(
                f"{path!r} is the name of a drafter, not a head: AutoSpeculator.from_name({path!r}, target=...)."
            )
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


def make_repository(repo_id: str, *, private: bool | None = None, token: str | bool | None = None) -> str:
    """Makes a model repository unless it exists; returns its full id, "owner/name"."""
    return HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True).repo_id


def upload_head(
    folder: str,
    repo_id: str,
    *,
    token: str | bool | None = None,
    commit_message: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Uploads a saved head in one commit; a model card that a person wrote there is kept.

    Raises:
        CheckpointError: the repository holds weights that the upload would not replace: readers look for several names
            and could take those.
    """
    api = HfApi(token=token)
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    present, new = api.list_repo_files(repo_id, revision=revision), os.listdir(folder)
    stale = sorted(name for name in present if "/" not in name and name.endswith(_WEIGHTS) and name not in new)
    if stale:
        raise CheckpointError(
            f"{repo_id} already holds the weights {', '.join(stale)}, which readers could take instead of "
            f"{', '.join(name for name in new if name.endswith(_WEIGHTS))}: delete them, or choose another repository, "
            "revision or layout."
        )
    keeps_card = CARD_FILE in present and not is_generated(api.hf_hub_download(repo_id, CARD_FILE, revision=revision))
    return api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        commit_message=commit_message,
        revision=revision,
        create_pr=create_pr,
        ignore_patterns=[CARD_FILE] if keeps_card else None,
    )
