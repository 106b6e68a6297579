"""Folders and Hub repositories of heads and draft models: found, downloaded, made and uploaded to."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import CommitInfo, HfApi, hf_hub_download, is_offline_mode, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from ..errors import CheckpointError, DrafterNotFoundError, UploadError, first_line
from ..files import file_names, read_json, user_path
from ..registry import installed_drafters, load_drafter, unknown_drafter_message
from .card import CARD_FILE, is_generated


_WEIGHTS = (".safetensors", ".bin", ".pt", ".index.json")
_FILES = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.model", "*.txt", "*.jinja"]
_GGUF = ".gguf"
_GGUF_ON_HUB = re.compile(r"([\w-][\w.-]*/[\w.-]+)/(.+\.gguf)")
_DOWNLOAD_ERRORS = (RepositoryNotFoundError, HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError)
_LATER = "Possible: train without it and run `hf-speculate push FOLDER` later."


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
        if os.path.exists(path) or path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise DrafterNotFoundError(
                f"{path!r} is not a folder. A head is a folder, a GGUF file or a Hub id 'owner/name'."
            )
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
        return f"{unknown_drafter_message(name)} Nor is it a folder; a head is a folder or a Hub id 'owner/name'."
    parent, last = os.path.split(name)
    near = difflib.get_close_matches(last, os.listdir(parent) if os.path.isdir(parent) else [], n=1)
    hint = f" (Did you mean {os.path.join(parent, near[0])!r}?)" if near else ""
    message = f"{name!r} is not a folder here{hint}, and its repository on the Hub"
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
    if not any(name.endswith(_WEIGHTS) for name in files):
        return f"{message}: it has no weights (*.safetensors, *.bin, *.pt); files: {', '.join(files) or 'none'}."
    if "config.json" not in files:
        return f"{message}: it has no config.json (it has {', '.join(files)}). Copy it from where the weights are from."
    config = read_json(os.path.join(folder, "config.json"))
    classes = config.get("architectures")
    stated = [config.get("speculators_model_type"), *(classes if isinstance(classes, list) else ())]
    kinds = [kind for kind in (*stated, config.get("model_type")) if isinstance(kind, str)]
    close = [name for kind in kinds for name in difflib.get_close_matches(kind.lower(), names, n=1)]
    hint = f" The nearest is {close[0]!r}, whose tensors it does not have." if close else ""
    kind = f"config.json names {' / '.join(dict.fromkeys(kinds))}" if kinds else "config.json does not name its kind"
    return f"{message}: {kind}, and no drafter knows its tensors.{hint} Files: {', '.join(files)}."


def check_upload(repo_id: str, *, token: str | bool | None = None) -> str:
    """The full id, "owner/name", of a repository that could be uploaded to; makes nothing.

    Raises:
        UploadError: the name is impossible, the user is not logged in, the owner is not yours, the token may only read,
            or the Hub cannot be reached.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UploadError(f"{repo_id!r} cannot be the name of a repository: {error}") from error
    user = _user(repo_id, token)
    owner = repo_id.rpartition("/")[0] or user["name"]
    organisations = {entry["name"]: entry for entry in user.get("orgs") or []}
    if owner != user["name"] and owner not in organisations:
        owners = ", ".join([user["name"], *organisations])
        raise UploadError(f"{user['name']} cannot upload to {repo_id}: {owner} is not one of {owners}.")
    if organisations.get(owner, {}).get("roleInOrg") == "read":
        raise UploadError(f"{user['name']} cannot upload to {repo_id}: the role in {owner} is to read.")
    full_id = f"{owner}/{repo_id.rpartition('/')[2]}"
    if not _may_write(user, owner, full_id):
        raise UploadError(
            f"the token of {user['name']} may not write to {full_id}: `hf auth login` with one that may. {_LATER}"
        )
    return full_id


def _user(repo_id: str, token: str | bool | None) -> dict[str, Any]:
    try:
        return HfApi(token=token).whoami()
    except LocalTokenNotFoundError as error:
        raise UploadError(f"cannot upload to {repo_id}: not logged in. `hf auth login`, or HF_TOKEN.") from error
    except Exception as error:  # a connection fails with errors of the HTTP library, which is not ours to name
        raise UploadError(
            f"cannot check with the Hub whether {repo_id} can be uploaded to: {first_line(error)} {_LATER}"
        ) from error


def _may_write(user: Mapping[str, Any], owner: str, full_id: str) -> bool:
    """Whether the token allows an upload; for unknown kinds of tokens, the upload will show it."""
    access = (user.get("auth") or {}).get("accessToken") or {}
    if access.get("role") != "fineGrained":
        return access.get("role") != "read"
    scopes = (access.get("fineGrained") or {}).get("scoped")
    return scopes is None or any(
        scope.get("entity", {}).get("name") in (owner, full_id) and "repo.write" in scope.get("permissions", ())
        for scope in scopes
    )


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
        CheckpointError: the repository holds weights that the upload would not replace. Readers look for several names,
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
