"""A Hub that is a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class FakeHub:
    """`HfApi` whose repositories are folders. Notes the calls.

    Attributes:
        user: what `whoami` answers.
        problem: raised by uploads, if there is one.
    """

    def __init__(self, root: Path):
        self.root, self.calls, self.tokens = root, [], []
        self.user: dict[str, Any] = {"name": "me", "orgs": [], "auth": {"accessToken": {"role": "write"}}}
        self.problem: Exception | None = None

    def __call__(self, token=None):
        self.tokens.append(token)
        return self

    def whoami(self):
        return self.user

    def folder(self, repo_id, revision=None) -> Path:
        return self.root / repo_id / (revision or "main")

    def create_repo(self, repo_id, private=None, exist_ok=False):
        full_id = repo_id if "/" in repo_id else f"me/{repo_id}"
        self.calls.append(("create_repo", full_id, private))
        assert exist_ok
        self.folder(full_id).mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(repo_id=full_id)

    def create_branch(self, repo_id, branch, exist_ok=False):
        self.calls.append(("create_branch", branch))
        if not self.folder(repo_id, branch).exists():
            shutil.copytree(self.folder(repo_id), self.folder(repo_id, branch))

    def list_repo_files(self, repo_id, revision=None):
        return [path.name for path in self.folder(repo_id, revision).iterdir()]

    def hf_hub_download(self, repo_id, filename, revision=None):
        return str(self.folder(repo_id, revision) / filename)

    def upload_folder(self, *, repo_id, folder_path, commit_message, revision, create_pr, ignore_patterns):
        if self.problem is not None:
            raise self.problem
        self.calls.append(("upload", repo_id, commit_message, revision, create_pr))
        ignored = shutil.ignore_patterns(*(ignore_patterns or ()))
        shutil.copytree(folder_path, self.folder(repo_id, revision), ignore=ignored, dirs_exist_ok=True)
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")
