"""Local folders and Hub repositories of heads and draft models."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from typing import Any

from huggingface_hub import CommitInfo, HfApi, is_offline_mode, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from ..errors import CheckpointError, DrafterNotFoundError, first_line
from ..files import file_names, read_json
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
            raise DrafterNotFoundError(_not_found(path, error, local_files_only)) from error
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
    raise CheckpointError(_not_recognised(folder, names))


def _not_found(name: str, error: Exception, local_files_only: bool) -> str:
    """What to say of a name that is no folder and could not be had from the Hub."""
    if "/" not in name:
        return f"{unknown_drafter_message(name)} Nor is it a folder; a head is a folder or a Hub id 'owner/name'."
    message = f"{name!r} is no folder here, and its repository on the Hub"
    if isinstance(error, RepositoryNotFoundError):
        return f"{message} does not exist, or is private: `hf auth login`, or pass token=."
    if isinstance(error, LocalEntryNotFoundError) and (local_files_only or is_offline_mode()):
        reason = "local_files_only=True" if local_files_only else "HF_HUB_OFFLINE is set"
        return (
            f"{message} is neither in the cache nor asked for ({reason}): allow that, or run `hf download {name}` "
            "where there is a network, or give a folder."
        )
    return f"{message} could not be had: {first_line(error)}"


def _not_recognised(folder: str, names: Sequence[str]) -> str:
    """What to say of a folder that no drafter takes: what is missing, or what kind it says that it is."""
    files = file_names(folder)
    message = f"no installed drafter ({', '.join(names)}) recognises the checkpoint in {folder}"
    if not any(name.endswith(_WEIGHTS) for name in files):
        return f"{message}: it has no weights (*.safetensors, *.bin, *.pt); files: {', '.join(files) or 'none'}."
    if "config.json" not in files:
        return f"{message}: it has no config.json (it has {', '.join(files)}). Copy it from where the weights are from."
    config = read_json(os.path.join(folder, "config.json"))
    stated = [config.get("speculators_model_type"), *_list(config.get("architectures")), config.get("model_type")]
    kinds = [kind for kind in stated if isinstance(kind, str)]
    close = [name for kind in kinds for name in difflib.get_close_matches(kind.lower(), names, n=1)]
    hint = f" The nearest is {close[0]!r}, whose tensors it does not have." if close else ""
    said = f"config.json says {' / '.join(dict.fromkeys(kinds))}" if kinds else "config.json does not say what it is"
    return f"{message}: {said}, and its tensors are of none that they know.{hint} Files: {', '.join(files)}."


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


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
