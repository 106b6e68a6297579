"""The form in which others may have a head: which files of its folder, and what in them.

An upload is a list of regular files that the layout names. Files with words in them are written anew where that is
needed, so that neither tokens nor paths of this machine are in them. What cannot be written anew and holds a secret is
refused.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.utils import yaml_dump

from ..drafting import CALIBRATION_FILE, CalibrationTable
from ..errors import CheckpointError
from ..files import own_file, read_json
from ..masking import find_secret, has_token, masked_prose
from ..messages import get_logger
from .card import ADAPTER_FOLDER, CARD_FILE, is_generated
from .origins import PROVENANCE_FILE, read_provenance
from .privacy import publishable
from .provenance import public_provenance, public_recipe
from .repositories import drafter_class_for


logger = get_logger(__name__)

RECIPE_FILE = "recipe.yaml"
# With the paths of this machine; never uploaded.
LOCAL_RECIPE_FILE = "recipe.local.yaml"
CURVES_FILE = "curves.png"
# Where a head comes from, what its values mean, and which adapter its target needs: with it wherever it goes.
ORIGINS = (
    PROVENANCE_FILE,
    RECIPE_FILE,
    CURVES_FILE,
    CALIBRATION_FILE,
    f"{ADAPTER_FOLDER}/adapter_config.json",
    f"{ADAPTER_FOLDER}/adapter_model.safetensors",
    f"{ADAPTER_FOLDER}/adapter_model.bin",
)
# Files of tokenizers whose every character counts.
_READ_BY_MODELS = ("tokenizer.json", "vocab.json", ".txt", ".jinja", ".model")
_PNG = b"\x89PNG\r\n\x1a\n"


def published_files(folder: str | os.PathLike, *, origins_only: bool = False) -> dict[str, Path]:
    """The files of a head that others may have: name in the upload -> where it lies.

    Those are the drafter's own (`Drafter.files`), the card and `ORIGINS`. Nothing else in the folder is looked at. A
    link in the place of an optional file is left out with a warning that names it.

    Args:
        folder: of the head.
        origins_only: leave out the drafter's own and the card.
    Raises:
        CheckpointError: no drafter recognises the folder; a file of the drafter's is a link, a pipe or a device.
    """
    own = () if origins_only else drafter_class_for(os.fspath(folder)).files(os.fspath(folder))
    found, problems = {name: own_file(folder, name) for name in own}, set()
    for name in ORIGINS if origins_only else (CARD_FILE, *ORIGINS):
        try:
            found.setdefault(name, own_file(folder, name))
        except CheckpointError as error:  # the same one for every file behind the link to a folder
            problems.add(str(error))
    for problem in sorted(problems):
        logger.warning(f"left out: {problem}")
    return {name: path for name, path in found.items() if path is not None}


def copy_published(files: Mapping[str, Path], destination: str | os.PathLike) -> None:
    """Copies files as they may be read by everybody; a broken optional one is left out with a warning.

    `recipe.yaml` is made of what the provenance says of it.

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
    """Makes the files of a saved head readable for everybody, in place.

    Raises:
        CheckpointError: one of them cannot be read, or holds a secret where it cannot be taken out.
    """
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and (content := _public_content(name, path)) is not None:
            path.write_bytes(content)


def _public_content(name: str, path: Path) -> bytes | None:
    """The bytes of a file as everybody may read them; None for the file as it is."""
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
                raise CheckpointError(f"{path} is no picture.")
    return None


def _calibration(path: Path) -> bytes:
    """The table as it is read: shares, and nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copyfile(path, Path(folder, CALIBRATION_FILE)))
        try:
            CalibrationTable.load(folder).save(folder)
        except CheckpointError:
            raise CheckpointError(
                f"{path} is no table of this version; `hf-speculate check --calibrate` writes it anew."
            ) from None
        return copy.read_bytes()


def _card(name: str, path: Path) -> bytes | None:
    """A person's words stay, but for secrets; what was generated, by us or PEFT, may change."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read the model card {path}: {error}") from error
    shown = publishable(text) if "/" in name or is_generated(path) else masked_prose(text)
    return None if shown == text else shown.encode("utf-8")


def _json(shown: Mapping[str, Any], content: Mapping[str, Any]) -> bytes | None:
    return None if shown == content else (json.dumps(shown, indent=2) + "\n").encode()


def _metadata(path: Path) -> Any:
    """The words in a file of safetensors, beside its tensors; None where it has none, or is no such file."""
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
