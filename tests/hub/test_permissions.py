"""Whether a repository can be uploaded to, asked before there is anything to upload."""

from __future__ import annotations

import pytest
from huggingface_hub.errors import LocalTokenNotFoundError

from hf_speculate.errors import UploadError
from hf_speculate.hub import check_upload, permissions
from tests.support.hub import FakeHub


def scope(name: str, *allowed: str) -> dict:
    return {"entity": {"type": "user", "name": name}, "permissions": list(allowed)}


def token(role: str, *scopes: dict) -> dict:
    return {"accessToken": {"role": role, "fineGrained": {"scoped": list(scopes)}}}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    fake = FakeHub(tmp_path)
    fake.user["orgs"] = [{"name": "lab", "roleInOrg": "write"}, {"name": "museum", "roleInOrg": "read"}]
    monkeypatch.setattr(permissions, "HfApi", fake)
    return fake


@pytest.mark.parametrize(("given", "full"), [("head", "me/head"), ("me/head", "me/head"), ("lab/head", "lab/head")])
def test_what_can_be_written(hub, given, full):
    assert check_upload(given, token="t") == full
    assert hub.tokens == ["t"]
    assert hub.calls == []  # nothing was made


@pytest.mark.parametrize(
    ("auth", "repo_id", "message"),
    [
        (token("write"), "a/b/c", "cannot be the name of a repository"),
        (token("write"), "you/head", "cannot upload to you/head: you is not one of me, lab, museum"),
        (token("write"), "museum/head", "the role in museum is to read"),
        (token("read"), "me/head", "the token of me may not write to me/head.*hf-speculate push FOLDER"),
        (token("fineGrained", scope("me", "repo.content.read")), "me/head", "may not write"),
        (token("fineGrained", scope("lab", "repo.write")), "me/head", "may not write"),
    ],
)
def test_what_cannot(hub, auth, repo_id, message):
    hub.user["auth"] = auth
    with pytest.raises(UploadError, match=message):
        check_upload(repo_id)


@pytest.mark.parametrize("name", ["me", "me/head"])
def test_a_fine_grained_token_of_the_owner_or_of_the_repository(hub, name):
    hub.user["auth"] = token("fineGrained", scope("lab"), scope(name, "repo.write"))
    assert check_upload("me/head") == "me/head"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalTokenNotFoundError("x"), "nobody is logged in. `hf auth login`"),
        (ConnectionError("offline mode"), "cannot ask the Hub .*offline mode.*push FOLDER"),
        (RuntimeError(""), "cannot ask the Hub .*RuntimeError"),
    ],
)
def test_a_hub_that_does_not_answer(hub, monkeypatch, error, message):
    def whoami():
        raise error

    monkeypatch.setattr(hub, "whoami", whoami)
    with pytest.raises(UploadError, match=message):
        check_upload("me/head")
