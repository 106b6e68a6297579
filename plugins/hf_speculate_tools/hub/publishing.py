"""The published form of a head: which files of its folder others may have, and their way to the Hub.

An upload is a list of regular files that the head's layout names. Provenance and recipe are lists of fields. A text
file that holds a secret is refused.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from huggingface_hub.utils import yaml_dump

from hf_speculate.drafting import CALIBRATION_FILE, SavedHead
from hf_speculate.errors import CheckpointError, SpeculateError, UploadError
from hf_speculate.files import json_writer, own_file, read_json, replace_files, section, text_writer, user_path
from hf_speculate.messages import get_logger, has_secret
from hf_speculate.speculator import Publisher, drafter_class_for, register_publisher
from hf_speculate_plugins.origin import PROVENANCE_FILE, read_provenance

from .card import CARD_FILE, has_custom_generate, rename_card, write_card, write_custom_generate
from .public import public_provenance
from .uploads import check_name, make_repository, upload_head


logger = get_logger(__name__)

RECIPE_FILE = "recipe.yaml"
# The recipe with paths of this machine; never uploaded.
LOCAL_RECIPE_FILE = "recipe.local.yaml"
CURVES_FILE = "curves.png"
# Files that go with a head wherever it goes: its origin, its calibration table.
ORIGINS = (PROVENANCE_FILE, RECIPE_FILE, CURVES_FILE, CALIBRATION_FILE)
# Files that are searched for secrets.
_TEXTS = (".json", ".md", ".yaml", ".txt", ".jinja")


def published_files(folder: str | os.PathLike, *, origins_only: bool = False) -> dict[str, Path]:
    """The files of a head that others may have: name in the upload -> path.

    These are the drafter's own (`Drafter.files`), the card and `ORIGINS`; no other file is looked at. A link in the
    place of an optional file is left out with a warning.

    Raises:
        CheckpointError: no drafter recognises the folder; a file of the drafter's is a link, a pipe or a device.
    """
    own = () if origins_only else drafter_class_for(os.fspath(folder)).files(os.fspath(folder))
    files, problems = {name: own_file(folder, name) for name in own}, set()
    for name in ORIGINS if origins_only else (CARD_FILE, *ORIGINS):
        try:
            files.setdefault(name, own_file(folder, name))
        except CheckpointError as error:  # the same one for every file of a linked folder
            problems.add(str(error))
    for problem in sorted(problems):
        logger.warning(f"left out: {problem}")
    return {name: path for name, path in files.items() if path is not None}


def copy_published(files: Mapping[str, Path], destination: str | os.PathLike, **added: Any) -> None:
    """Copies files; provenance and recipe are written again, with their allowed fields and those of `added`.

    Raises:
        CheckpointError: the provenance cannot be read.
    """
    for name, path in files.items():
        if name not in (PROVENANCE_FILE, RECIPE_FILE):
            target = Path(destination, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    if PROVENANCE_FILE in files:
        content = public_provenance(read_json(files[PROVENANCE_FILE]) | added)
        replace_files(destination, {PROVENANCE_FILE: json_writer(content)})
    if RECIPE_FILE in files:
        if recipe := (read_provenance(destination) or {}).get("recipe"):
            replace_files(destination, {RECIPE_FILE: text_writer(yaml_dump(recipe))})
        else:
            logger.warning(f"left out: {RECIPE_FILE}, whose fields {PROVENANCE_FILE} does not have.")


def check_public(folder: str | os.PathLike, saved: SavedHead) -> None:
    """Raises `CheckpointError` if a text file of a head holds a secret; warns if its target is named by a path."""
    for path in sorted(Path(folder).rglob("*")):
        if path.suffix in _TEXTS and has_secret(path.read_text(encoding="utf-8", errors="replace")):
            name = path.relative_to(folder).as_posix()
            raise CheckpointError(f"{name} holds what looks like a token or a password: take it out.")
    if saved.base_model and os.path.isabs(saved.base_model):
        logger.warning(f"config.json names the target by a path, {saved.base_model}: write its Hub id there.")


def copy_origins(source: str | os.PathLike, folder: str | os.PathLike, **added: Any) -> None:
    """Copies the origin of a head (`ORIGINS`) from `source` to `folder`, with further fields of the provenance."""
    copy_published(published_files(source, origins_only=True), folder, **added)


def card_facts(folder: str | os.PathLike, saved: SavedHead | None = None) -> dict[str, Any]:
    """Arguments of `write_card` for a trained head, from its files and its provenance.

    Raises:
        CheckpointError: no drafter recognises the folder.
    """
    provenance = read_provenance(folder) or {}
    facts = asdict(saved or drafter_class_for(os.fspath(folder)).describe(os.fspath(folder)))
    facts["base_model"] = facts["base_model"] or section(provenance, "target").get("name")
    recipe, data = section(provenance, "recipe"), section(provenance, "recipe", "data")
    figures = {name: value for name, value in section(provenance, "metrics").items() if "acceptance" in name}
    facts["metrics"] = {name.removeprefix("eval_"): value for name, value in figures.items() if _is_figure(value)}
    if facts["metrics"] and (source := data.get("eval") or data.get("train")):
        facts["measured_on"] = f"{provenance.get('evaluation_prompts', 'the')} held-out prompts of {Path(source).name}"
    if recipe:
        facts["notes"] = section(recipe, "output").get("notes") or _notes(recipe)
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
    """Uploads the head in a folder with card, provenance, recipe and curves; private files stay here.

    Args:
        repo_id: "owner/name", or "name" for one of your own; None: the name in its provenance, else its folder's.
        private: whether a new repository is private; None: the owner's default.
        token, commit_message, revision: as everywhere on the Hub.
    Raises:
        CheckpointError: there is no head in the folder, or one of its files holds a secret. No repository is made.
        UploadError: the Hub did not take it; the folder is as it was.
    """
    place = Path(user_path(folder))
    saved = drafter_class_for(str(place)).describe(str(place))
    with tempfile.TemporaryDirectory() as staged:
        copy_published(published_files(place), staged)
        if has_custom_generate(place):
            write_custom_generate(staged)
        check_public(staged, saved)
        asked = section(read_provenance(staged) or {}, "recipe", "output").get("push_to_hub")
        wanted = repo_id or asked or place.resolve().name
        try:
            full_id = make_repository(wanted, private=private, token=token)
            if not rename_card(staged, **asdict(saved), repo_id=full_id):
                write_card(staged, **card_facts(staged, saved), repo_id=full_id)  # a person's stays
            message = commit_message or f"Upload {saved.algorithm} head"
            return upload_head(staged, full_id, token=token, commit_message=message, revision=revision)
        except SpeculateError:
            raise
        except Exception as error:  # a connection fails with errors of the HTTP library, which is not ours to name
            raise UploadError(f"{place} could not be uploaded to {wanted}: {error}. Nothing in it is lost.") from error


class HubPublisher(Publisher):
    """Publishes heads on the Hugging Face Hub, for `Speculator.save_pretrained` and `push_to_hub`."""

    def write_card(
        self, folder: str | os.PathLike, saved: SavedHead, *, custom_generate: bool, **contents: Any
    ) -> None:
        if custom_generate:
            write_custom_generate(folder)
        write_card(folder, **asdict(saved), **contents)

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
        check_public(folder, saved)  # what cannot be uploaded fails before a repository is made
        repo_id = make_repository(repo_id, private=private, token=token)
        self.write_card(folder, saved, custom_generate=custom_generate, repo_id=repo_id, **contents)
        return upload_head(
            folder,
            repo_id,
            token=token,
            commit_message=commit_message or f"Upload {saved.algorithm} head ({saved.layout} layout)",
            revision=revision,
            create_pr=create_pr,
        )


register_publisher(HubPublisher())


def recorded_card(folder: str | os.PathLike, repo_id: str | None = None) -> bool:
    """Regenerates the card of a head from its provenance, or without one from its generated card.

    Returns:
        False if the folder has a card that a person wrote, which was kept.
    """
    if repo_id is not None:
        check_name(repo_id)
    folder = user_path(folder)
    facts = card_facts(folder)
    names = {name: facts[name] for name in ("base_model", "algorithm", "layout")}
    was_renamed = "notes" not in facts and rename_card(folder, **names, repo_id=repo_id)
    return was_renamed or write_card(folder, **facts, repo_id=repo_id)


def _is_figure(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(item, int | float) for item in values)


def _notes(recipe: Mapping[str, Any]) -> str:
    method, data = section(recipe, "method").get("name"), section(recipe, "data").get("train")
    return (
        f"Trained with hf-speculate, method `{method}`, on `{Path(str(data)).name}`. "
        f"Recipe: `{RECIPE_FILE}`; versions, data fingerprint, hardware, metrics: `{PROVENANCE_FILE}`; "
        f"curves: `{CURVES_FILE}`."
    )
