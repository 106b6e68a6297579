"""Whether a repository could be uploaded to, found out before there is anything to upload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from ..errors import UploadError, first_line


_LATER = "Possible: train without it and run `hf-speculate push FOLDER` later."


def check_upload(repo_id: str, *, token: str | bool | None = None) -> str:
    """The full id, "owner/name", of a repository that can be made or written to; makes nothing.

    Raises:
        UploadError: no such name, nobody logged in, an owner that is not yours, a token that may only read, or no way
            to the Hub.
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
        raise UploadError(f"cannot upload to {repo_id}: nobody is logged in. `hf auth login`, or HF_TOKEN.") from error
    # A connection fails with errors of the HTTP library, which is not ours to name.
    except Exception as error:
        raise UploadError(
            f"cannot ask the Hub whether {repo_id} can be uploaded to: {first_line(error)} {_LATER}"
        ) from error


def _may_write(user: Mapping[str, Any], owner: str, full_id: str) -> bool:
    """What the token allows; of kinds that are not known, the upload will tell."""
    access = (user.get("auth") or {}).get("accessToken") or {}
    if access.get("role") != "fineGrained":
        return access.get("role") != "read"
    scopes = (access.get("fineGrained") or {}).get("scoped")
    return scopes is None or any(
        scope.get("entity", {}).get("name") in (owner, full_id) and "repo.write" in scope.get("permissions", ())
        for scope in scopes
    )
