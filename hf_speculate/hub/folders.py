"""The folder of a head: what it says of itself, which of its files others may have, and how they get them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo

from ..drafting import CALIBRATION_FILE
from ..errors import SpeculateError, UploadError
from ..files import json_writer, replace_files, section
from .card import ADAPTER_FOLDER, rename_card, write_card
from .origins import PROVENANCE_FILE, read_provenance
from .privacy import clean_folder, publishable
from .remote_code import CUSTOM_GENERATE_FOLDER
from .repositories import drafter_class_for, make_repository, upload_head


if TYPE_CHECKING:
    from ..drafting import SavedHead


RECIPE_FILE = "recipe.yaml"
# With the paths of this machine; never uploaded.
LOCAL_RECIPE_FILE = "recipe.local.yaml"
CURVES_FILE = "curves.png"


def public_files(folder: str | os.PathLike) -> list[Path]:
    """The files of a head that may be uploaded: no checkpoints, no logs of the trainer, no paths, nothing hidden."""
    files = (path for path in sorted(Path(folder).iterdir()) if path.is_file())
    return [path for path in files if path.name != LOCAL_RECIPE_FILE and not path.name.startswith(".")]


def file_hashes(folder: str | os.PathLike) -> dict[str, str]:
    """sha256 of the files of a head, by name; checkpoints and the provenance itself are left out."""
    hashes = {}
    for path in public_files(folder):
        if path.name != PROVENANCE_FILE:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            hashes[path.name] = digest.hexdigest()
    return hashes


def refresh_hashes(folder: str | os.PathLike, **added: Any) -> None:
    """Brings the hashes in `provenance.json` up to date with the files beside it.

    Args:
        added: what else the provenance is to say.
    """
    if found := read_provenance(folder):
        content = found | publishable(added) | {"files": file_hashes(folder)}
        replace_files(folder, {PROVENANCE_FILE: json_writer(content)})


def copy_origins(source: str | os.PathLike, folder: str | os.PathLike, **added: Any) -> None:
    """Takes what `source` says of its head (provenance, recipe, curves, what its values mean, the target's adapter) to
    `folder`.

    Args:
        added: what the provenance is to say besides.
    """
    for name in (PROVENANCE_FILE, RECIPE_FILE, CURVES_FILE, CALIBRATION_FILE):
        if (path := Path(source) / name).is_file():
            shutil.copyfile(path, Path(folder) / name)
    if (adapter := Path(source) / ADAPTER_FOLDER).is_dir():
        shutil.copytree(adapter, Path(folder) / ADAPTER_FOLDER)
    refresh_hashes(folder, **added)


def card_facts(folder: str | os.PathLike, saved: SavedHead | None = None) -> dict[str, Any]:
    """What `write_card` can say of a trained head, from its files and its provenance.

    Args:
        saved: what was just written; None: what the drafter finds in the folder.
    Raises:
        CheckpointError: no drafter recognises it.
    """
    found = read_provenance(folder) or {}
    facts = asdict(saved or drafter_class_for(os.fspath(folder)).describe(os.fspath(folder)))
    facts["base_model"] = facts["base_model"] or section(found, "target").get("name")
    recipe, data = section(found, "recipe"), section(found, "recipe", "data")
    figures = section(found, "metrics").items()
    facts["metrics"] = {name.removeprefix("eval_"): value for name, value in figures if "acceptance" in name}
    if facts["metrics"] and (source := data.get("eval") or data.get("train")):
        facts["measured_on"] = f"{found.get('evaluation_prompts', 'the')} held-out prompts of {Path(source).name}"
    if recipe:
        facts["notes"] = publishable(section(recipe, "output").get("notes")) or _notes(recipe)
    return facts


def push_folder(
    folder: str | os.PathLike,
    repo_id: str | None = None,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    revision: str | None = None,
) -> CommitInfo:
    """Uploads the head in a folder with card, provenance, recipe and curves; what is private stays here.

    Args:
        repo_id: "owner/name", or "name" for one of your own; None: the one that its provenance or its folder names.
        private: whether a new repository is private; None: the owner's default.
    Raises:
        CheckpointError: no head is in the folder. Nothing is made then.
        UploadError: the Hub did not take it; the folder is as it was.
    """
    place = Path(folder)
    saved = drafter_class_for(os.fspath(folder)).describe(os.fspath(folder))
    asked = section(read_provenance(folder) or {}, "recipe", "output").get("push_to_hub")
    wanted = repo_id or asked or place.resolve().name
    with tempfile.TemporaryDirectory() as staged:
        for path in public_files(place):
            shutil.copy2(path, staged)
        for name in (ADAPTER_FOLDER, CUSTOM_GENERATE_FOLDER):
            if (place / name).is_dir():
                shutil.copytree(place / name, Path(staged) / name)
        try:
            full_id = make_repository(wanted, private=private, token=token)
            if not rename_card(staged, **asdict(saved), repo_id=full_id):
                write_card(staged, **card_facts(folder, saved), repo_id=full_id)  # a person's stays
            clean_folder(staged)
            refresh_hashes(staged)
            message = commit_message or f"Upload {saved.algorithm} head"
            return upload_head(staged, full_id, token=token, commit_message=message, revision=revision)
        except SpeculateError:
            raise
        # A connection fails with errors of the HTTP library, which is not ours to name.
        except Exception as error:
            raise UploadError(f"{place} could not be uploaded to {wanted}: {error}. Nothing in it is lost.") from error


def recorded_card(folder: str | os.PathLike, repo_id: str | None = None) -> bool:
    """Writes the card of a head anew: from its provenance, or, where it has none, from its generated card.

    Returns:
        False if the folder has a card that a person wrote: that one was kept.
    """
    facts = card_facts(folder)
    names = {name: facts[name] for name in ("base_model", "algorithm", "layout")}
    was_renamed = "notes" not in facts and rename_card(folder, **names, repo_id=repo_id)
    is_ours = was_renamed or write_card(folder, **facts, repo_id=repo_id)
    if is_ours:
        refresh_hashes(folder)
    return is_ours


def _notes(recipe: Mapping[str, Any]) -> str:
    method, data = section(recipe, "method").get("name"), section(recipe, "data").get("train")
    return (
        f"Trained with hf-speculate, method `{method}`, on `{Path(str(data)).name}`. "
        f"Recipe: `{RECIPE_FILE}`; versions, data fingerprint, hardware, metrics: `{PROVENANCE_FILE}`; "
        f"curves: `{CURVES_FILE}`."
    )
