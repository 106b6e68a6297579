"""The publisher of heads: the engine saves weights, and a publisher adds the model card and uploads the folder.

The engine has no publisher of its own. A package above it registers one.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from huggingface_hub import CommitInfo

from ..drafting import SavedHead
from ..errors import SpeculateError


# Module that registers a publisher when it is imported: cards and uploads are needed rarely, so it is imported late.
_PROVIDER = "hf_speculate_tools.hub"

_registered: list[Publisher] = []


class Publisher(ABC):
    """Writes model cards of heads and uploads their folders."""

    @abstractmethod
    def write_card(
        self, folder: str | os.PathLike, saved: SavedHead, *, custom_generate: bool, **contents: Any
    ) -> None:
        """Writes the model card of a saved head, unless the folder has one that a person wrote.

        Args:
            folder: folder of the head.
            saved: description of what was saved in it.
            custom_generate: whether to write a folder of that name too, with code for `model.generate`.
            contents: contents of the card: `metrics`, `notes` and `measured_on`.
        """

    @abstractmethod
    def upload(
        self,
        folder: str,
        saved: SavedHead,
        repo_id: str,
        *,
        private: bool | None,
        token: str | bool | None,
        commit_message: str | None,
        revision: str | None,
        create_pr: bool,
        custom_generate: bool,
        **contents: Any,
    ) -> CommitInfo:
        """Writes the card of a saved head and uploads its folder; see `Speculator.push_to_hub` for the arguments."""


def register_publisher(publisher: Publisher) -> None:
    """Makes a publisher the one that `Speculator.save_pretrained` and `push_to_hub` use."""
    _registered[:] = [publisher]


def registered_publisher() -> Publisher:
    """The registered publisher; raises `SpeculateError` if there is none."""
    if not _registered and find_spec(_PROVIDER.partition(".")[0]) is not None:
        import_module(_PROVIDER)
    if not _registered:
        raise SpeculateError(
            f"model cards and uploads need the package {_PROVIDER.partition('.')[0]}, which is not installed: "
            "`pip install --force-reinstall --no-deps hf-speculate`."
        )
    return _registered[0]
