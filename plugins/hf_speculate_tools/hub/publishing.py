"""The published form of a head: which files of its folder others may have, their content, and their way to the Hub.

An upload is a list of regular files that the head's layout names. Text files are rewritten where they hold secrets or
paths of this machine. A file that cannot be rewritten and holds a secret is refused.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from huggingface_hub.utils import yaml_dump

from hf_speculate.drafting import CALIBRATION_FILE, CalibrationTable, SavedHead
from hf_speculate.errors import CheckpointError, SpeculateError, UploadError
from hf_speculate.files import json_writer, own_file, read_json, replace_files, section, user_path
from hf_speculate.hub import PROVENANCE_FILE, drafter_class_for, read_provenance
from hf_speculate.messages import find_secret, get_logger, has_token, masked_prose

from .card import (
    CARD_FILE,
    has_custom_generate,
    is_generated,
    rename_card,
    write_card,
    write_custom_generate,
)
from .public import public_provenance, public_recipe, publishable
from .uploads import make_repository, upload_head


logger = get_logger(__name__)

RECIPE_FILE = "recipe.yaml"
# The recipe with paths of this machine; never uploaded.
LOCAL_RECIPE_FILE = "recipe.local.yaml"
CURVES_FILE = "curves.png"
# Files that go with a head wherever it goes: its origin, its calibration table.
ORIGINS = (PROVENANCE_FILE, RECIPE_FILE, CURVES_FILE, CALIBRATION_FILE)
# Files of tokenizers, in which every character counts.
_READ_BY_MODELS = ("tokenizer.json", "vocab.json", ".txt", ".jinja", ".model")
_PNG = b"\x89PNG\r\n\x1a\n"


def published_files(folder: str | os.PathLike, *, origins_only: bool = False) -> dict[str, Path]:
    """The files of a head that others may have: name in the upload -> path.

    These are the drafter's own (`Drafter.files`), the card and `ORIGINS`; no other file is looked at. A link in the
    place of an optional file is left out with a warning.

    Args:
        folder: folder of the head.
        origins_only: whether to leave out the drafter's own files and the card.
    Raises:
        CheckpointError: no drafter recognises the folder; a file of the drafter's is a link, a pipe or a device.
    """
    own = () if origins_only else drafter_class_for(os.fspath(folder)).files(os.fspath(folder))
    found, problems = {name: own_file(folder, name) for name in own}, set()
    for name in ORIGINS if origins_only else (CARD_FILE, *ORIGINS):
        try:
            found.setdefault(name, own_file(folder, name))
        except CheckpointError as error:  # the same one for every file of a linked folder
            problems.add(str(error))
    for problem in sorted(problems):
        logger.warning(f"left out: {problem}")
    return {name: path for name, path in found.items() if path is not None}


def copy_published(files: Mapping[str, Path], destination: str | os.PathLike) -> None:
    """Copies files in their public form; a broken optional one is left out with a warning.

    `recipe.yaml` is written again, from the recipe in the provenance.

    Raises:
        CheckpointError: a file of the drafter's cannot be read, or holds a secret where it cannot be taken out.
    """
    for name, path in files.items():
        if name == RECIPE_FILE:
            continue
        target = Path(destination, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            content = _public_content(name, path)
        except CheckpointError as error:
            if name not in ORIGINS:
                raise
            logger.warning(f"left out: {error}")
            continue
        if content is None:
            shutil.copyfile(path, target)
        else:
            target.write_bytes(content)
    if RECIPE_FILE in files:
        recipe = (read_provenance(destination) or {}).get("recipe")
        if recipe:
            Path(destination, RECIPE_FILE).write_text(yaml_dump(public_recipe(recipe)), encoding="utf-8")
        else:
            logger.warning(f"left out: {RECIPE_FILE}, whose fields {PROVENANCE_FILE} does not have.")


def clean_folder(folder: str | os.PathLike) -> None:
    """Brings the files of a saved head into their public form, in place.

    Raises:
        CheckpointError: one of them cannot be read, or holds a secret where it cannot be taken out.
    """
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and (content := _public_content(name, path)) is not None:
            path.write_bytes(content)


def _public_content(name: str, path: Path) -> bytes | None:
    """The public bytes of a file; None: it stays as it is."""
    file = name.rpartition("/")[2]
    if file == CALIBRATION_FILE:
        return _calibration(path)
    elif file == PROVENANCE_FILE:
        content = read_json(path)
        return _json(public_provenance(content), content)
    elif file.endswith(_READ_BY_MODELS):
        _refuse(name, has_token(path.read_bytes().decode("utf-8", "replace")))
    elif file.endswith(".json"):
        content = read_json(path)
        return _json(publishable(content), content)
    elif file == CARD_FILE:
        return _card(name, path)
    elif file.endswith(".safetensors"):
        _refuse(name, find_secret(_metadata(path)) is not None)
    elif file == CURVES_FILE:
        with path.open("rb") as picture:
            if picture.read(len(_PNG)) != _PNG:
                raise CheckpointError(f"{path} is not a PNG file.")
    return None


def _calibration(path: Path) -> bytes:
    """The calibration table as the drafter reads it: shares, and nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copyfile(path, Path(folder, CALIBRATION_FILE)))
        try:
            CalibrationTable.load(folder).save(folder)
        except CheckpointError:
            raise CheckpointError(
                f"{path} is not a table of this version; run `hf-speculate check --calibrate` to write it again."
            ) from None
        return copy.read_bytes()


def _card(name: str, path: Path) -> bytes | None:
    """A card without secrets; one that was generated, by us or PEFT, without paths too."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read the model card {path}: {error}") from error
    shown = publishable(text) if "/" in name or is_generated(path) else masked_prose(text)
    return None if shown == text else shown.encode("utf-8")


def _json(shown: Mapping[str, Any], content: Mapping[str, Any]) -> bytes | None:
    return None if shown == content else (json.dumps(shown, indent=2) + "\n").encode()


def _metadata(path: Path) -> Any:
    """The metadata of a safetensors file; None if it has none, or is not such a file."""
    with path.open("rb") as file:
        head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        try:
            return json.loads(file.read(min(size, 100 << 20))).get("__metadata__")
        except (ValueError, RecursionError, AttributeError):
            return None


def _refuse(name: str, holds_secret: bool) -> None:
    if holds_secret:
        raise CheckpointError(f"{name} holds what looks like a token or a password: take it out.")


def copy_origins(source: str | os.PathLike, folder: str | os.PathLike, **added: Any) -> None:
    """Copies the origin of a head (`ORIGINS`) from `source` to `folder`.

    Args:
        added: further fields of the provenance.
    """
    copy_published(published_files(source, origins_only=True), folder)
    if found := read_provenance(folder):
        replace_files(folder, {PROVENANCE_FILE: json_writer(public_provenance(found | added))})


def card_facts(folder: str | os.PathLike, saved: SavedHead | None = None) -> dict[str, Any]:
    """Arguments of `write_card` for a trained head, from its files and its provenance.

    Args:
        saved: the head that was just written; None: the drafter describes the folder.
    Raises:
        CheckpointError: no drafter recognises the folder.
    """
    found = read_provenance(folder) or {}
    facts = asdict(saved or drafter_class_for(os.fspath(folder)).describe(os.fspath(folder)))
    facts["base_model"] = facts["base_model"] or section(found, "target").get("name")
    recipe, data = section(found, "recipe"), section(found, "recipe", "data")
    figures = {name: value for name, value in section(found, "metrics").items() if "acceptance" in name}
    facts["metrics"] = {name.removeprefix("eval_"): value for name, value in figures.items() if _is_figure(value)}
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
    """Uploads the head in a folder with card, provenance, recipe and curves; private files stay here.

    Args:
        repo_id: "owner/name", or "name" for one of your own; None: the name in its provenance, else its folder's.
        private: whether a new repository is private; None: the owner's default.
        token, commit_message, revision: as everywhere on the Hub.
    Raises:
        CheckpointError: there is no head in the folder, or one of its files must not leave. No repository is made.
        UploadError: the Hub did not take it; the folder is as it was.
    """
    place = Path(user_path(folder))
    saved = drafter_class_for(str(place)).describe(str(place))
    with tempfile.TemporaryDirectory() as staged:
        copy_published(published_files(place), staged)
        if has_custom_generate(place):
            write_custom_generate(staged)
        asked = section(read_provenance(staged) or {}, "recipe", "output").get("push_to_hub")
        wanted = repo_id or asked or place.resolve().name
        try:
            full_id = make_repository(wanted, private=private, token=token)
            if not rename_card(staged, **asdict(saved), repo_id=full_id):
                write_card(staged, **card_facts(staged, saved), repo_id=full_id)  # a person's stays
            clean_folder(staged)
            message = commit_message or f"Upload {saved.algorithm} head"
            return upload_head(staged, full_id, token=token, commit_message=message, revision=revision)
        except SpeculateError:
            raise
        except Exception as error:  # a connection fails with errors of the HTTP library, which is not ours to name
            raise UploadError(f"{place} could not be uploaded to {wanted}: {error}. Nothing in it is lost.") from error


def recorded_card(folder: str | os.PathLike, repo_id: str | None = None) -> bool:
    """Regenerates the card of a head from its provenance, or without one from its generated card.

    Returns:
        False if the folder has a card that a person wrote, which was kept.
    """
    folder = user_path(folder)
    facts = card_facts(folder)
    names = {name: facts[name] for name in ("base_model", "algorithm", "layout")}
    was_renamed = "notes" not in facts and rename_card(folder, **names, repo_id=repo_id)
    return was_renamed or write_card(folder, **facts, repo_id=repo_id)


def _is_figure(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(each, int | float) for each in values)


def _notes(recipe: Mapping[str, Any]) -> str:
    method, data = section(recipe, "method").get("name"), section(recipe, "data").get("train")
    return (
        f"Trained with hf-speculate, method `{method}`, on `{Path(str(data)).name}`. "
        f"Recipe: `{RECIPE_FILE}`; versions, data fingerprint, hardware, metrics: `{PROVENANCE_FILE}`; "
        f"curves: `{CURVES_FILE}`."
    )
