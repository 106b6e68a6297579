"""The facts that tables of the pages state, as the code and the metadata have them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_speculate import AutoSpeculator
from hf_speculate.errors import OptionError, SpeculateError
from hf_speculate.speculator import drafter_class_for, installed_drafters
from hf_speculate.speculator.registry import JOINING_GROUP, find_installed
from hf_speculate_plugins.block import BlockFiles
from hf_speculate_plugins.eagle import EagleFiles
from hf_speculate_plugins.medusa.loading import LAYOUTS as medusa_layouts

from ..support.block_heads import KINDS, random_block, spec_of
from ..support.heads import EAGLE_LAYOUTS, target, write_head, write_medusa_heads
from .pages import REPOSITORY


EXAMPLES = REPOSITORY / "examples"
# Bundled heads, and the options that some drafters need: enough to make each drafter for pycoder, but for `mtp`.
HEADS = {"eagle": "pycoder-eagle3", "medusa": "pycoder-medusa", "block": "pycoder-dspark"}
NEEDS = {"draft_model": {"model": str(EXAMPLES / "pycoder-draft")}}
# Names of heads that have the files of others: EAGLE-2 is EAGLE-1 with dynamic trees, JetSpec a causal DFlash.
_ALIASES = {"eagle1": "eagle", "eagle2": "eagle", "jetspec": "dflash", "medusa1": "medusa", "medusa2": "medusa"}


def metadata() -> dict[str, Any]:
    """The table `project` of pyproject.toml; skips on Python 3.10, which cannot read it."""
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def oldest(package: str) -> str:
    """The oldest version of a package that pyproject.toml allows."""
    (version,) = (found[1] for line in metadata()["dependencies"] if (found := re.match(rf"{package}>=([\d.]+)", line)))
    return version


def releases() -> list[str]:
    """Releases of transformers that `make versions` names, as "5.24", the oldest first."""
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    (versions,) = re.findall(r"^VERSIONS := (.*)$", makefile, re.MULTILINE)
    return [version.rpartition(".")[0] for version in versions.split()]


def is_released() -> bool:
    """Whether the changelog has a version besides what is unreleased: releasing gives it one."""
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.findall(r"^## (.*)$", changelog, re.MULTILINE) != ["Unreleased"]


@cache
def coder() -> PreTrainedModel:
    """The bundled target."""
    return AutoModelForCausalLM.from_pretrained(EXAMPLES / "pycoder", dtype=torch.float32)


def built_in_drafters() -> list[str]:
    """Names of the drafters that come with this package."""
    return [name for name, point in installed_drafters().items() if point.value.startswith("hf_speculate_plugins")]


def joining_drafters() -> set[str]:
    """Names of the drafters that draft together with others."""
    return {*find_installed(JOINING_GROUP, "drafter")}


def drafters_without_weights() -> set[str]:
    """Drafters that can be made for any target by their name alone; those that only join others are left out."""
    found = set()
    for name in {*built_in_drafters()} - joining_drafters():
        with suppress(SpeculateError):
            AutoSpeculator.from_name(name, target=coder())
            found.add(name)
    return found


def options_of(drafter: str) -> set[str]:
    """Options that a drafter takes, as its own error lists them."""
    head, needs = HEADS.get(drafter), NEEDS.get(drafter, {})
    make = AutoSpeculator.from_name if head is None else AutoSpeculator.from_pretrained
    with pytest.raises(OptionError, match="unknown option 'nonsense'") as caught:
        make(drafter if head is None else EXAMPLES / head, target=coder(), nonsense=1, **needs)
    (names,) = re.findall(rf"the drafter '{drafter}' takes ([\w, ]+);", str(caught.value))
    return set(names.split(", "))


def head_kind(name: str) -> str:
    """The kind of head that a page calls "EAGLE-3" or "P-EAGLE", as the Hub's tag has it."""
    tag = name.lower().replace("-", "")
    return _ALIASES.get(tag, tag)


def writable_layouts() -> dict[str, set[str]]:
    """Layouts by kind of head: those that can express some head of that kind."""
    layouts: dict[str, set[str]] = {"medusa": {*medusa_layouts}}
    for files, kind, spec in (*_block_heads(), *_eagle_heads()):
        layouts.setdefault(kind, set()).update(each for each in files.limits if not files.problems(each, spec))
    return layouts


def _block_heads() -> Iterator[tuple[Any, str, Any]]:
    """(files, kind, spec) of heads as the projects of all layouts make them. JetSpec's adapt their features."""
    plain = {"windows": (None, None)}, {"embedding_scale": 1.0, "output_multiplier": 1.0, "softcap": None}
    for name, first_slot, from_anchor, more in product(KINDS, (0, 1), (True, False), plain):
        spec = spec_of(name, first_slot=first_slot, window_from_anchor=from_anchor, **more)
        yield BlockFiles, spec.algorithm, spec
        if name == "jetspec":
            yield BlockFiles, name, replace(spec, adapts_features=True)


def _eagle_heads() -> Iterator[tuple[Any, str, Any]]:
    """The same of EAGLE heads, with an output matrix of their own and without."""
    with TemporaryDirectory() as folder:
        for layout in EAGLE_LAYOUTS:
            spec = EagleFiles.open(write_head(f"{folder}/{layout}", layout)).spec
            yield from ((EagleFiles, spec.algorithm, replace(spec, own_output=is_own)) for is_own in (True, False))


@cache
def readable_heads() -> set[str]:
    """Kinds of heads that the installed drafters recognise, among all that the suite can write."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for layout in EAGLE_LAYOUTS:
            write_head(folder / layout, layout)
        for kind in KINDS:
            random_block(kind, target()).save_pretrained(folder / kind)
        write_medusa_heads(folder / "medusa")
        return {drafter_class_for(str(head)).describe(str(head)).algorithm for head in folder.iterdir()}
