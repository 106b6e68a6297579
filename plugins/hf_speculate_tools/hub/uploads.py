"""Hub repositories of heads: checked before a run, made, and uploaded to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from hf_speculate.errors import CheckpointError, UploadError, first_line
from hf_speculate.speculator import WEIGHTS

from .card import CARD_FILE, is_generated


_LATER = "Possible: train without it and run `hf-speculate push FOLDER` later."


def check_name(repo_id: str) -> None:
    """Raises `UploadError` for a name that no repository can have."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UploadError(f"{repo_id!r} cannot be the name of a repository: {error}") from error


def check_upload(repo_id: str, *, token: str | bool | None = None) -> str:
    """The full id, "owner/name", of a repository that could be uploaded to; makes nothing.

    Raises:
        UploadError: the name is impossible, the user is not logged in, the owner is not yours, the token may only read,
            or the Hub cannot be reached.
    """
    check_name(repo_id)
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
    stale = sorted(name for name in present if "/" not in name and name.endswith(WEIGHTS) and name not in new)
    if stale:
        raise CheckpointError(
            f"{repo_id} already holds the weights {', '.join(stale)}, which readers could take instead of "
            f"{', '.join(name for name in new if name.endswith(WEIGHTS))}: delete them, or choose another repository, "
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
