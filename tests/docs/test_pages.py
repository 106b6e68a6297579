"""Pages point at what is there, and stay as short as they promise."""

from __future__ import annotations

import importlib
import importlib.util
import re

import pytest

from .pages import PAGES, README, REPOSITORY, blocks, links, name_of, spans


_ADDRESS = re.compile(r"^[a-z]+:")
# (transformers has folders in `tests`, too.)
_OF_THE_REPOSITORY = re.compile(r"^((docs|examples|hf_speculate|plugins|training)/[\w./*-]*\w/?|tests/[\w./*-]*\.\w+)$")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page):
    for target in links(page):
        path = target.partition("#")[0]
        if path and not _ADDRESS.match(target):
            assert (page.parent / path).exists(), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_in_the_text_are_those_of_the_repository(page):
    for span in spans(page):
        if _OF_THE_REPOSITORY.match(span):
            assert any(REPOSITORY.glob(span)), f"{name_of(page)} names {span}"


@pytest.mark.parametrize("card", sorted((REPOSITORY / "examples").glob("*/README.md")), ids=name_of)
def test_files_that_cards_name_are_next_to_them_or_in_the_repository(card):
    for span in spans(card):
        if re.fullmatch(r"[\w./-]+\.(yaml|json|png|py|safetensors)", span):
            places = (card.parent, *(path for path in card.parent.iterdir() if path.is_dir()), REPOSITORY)
            assert any((place / span).exists() for place in places), f"{name_of(card)} names {span}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_targets_of_make_exist(page):
    targets = set((REPOSITORY / "Makefile").read_text(encoding="utf-8").split())
    code = [*spans(page), *(block.text for block in blocks(page))]
    named = {name for text in code for name in re.findall(r"^make ([a-z][\w-]*)", text, re.MULTILINE)}
    missing = {name for name in named if name not in targets and f"{name}:" not in targets}
    assert not missing, f"{name_of(page)} names {missing}"


def test_systems_that_were_not_tested_are_named_where_one_installs_and_promised_nowhere():
    install = README.read_text(encoding="utf-8").partition("## Install")[2].partition("\n## ")[0]
    for name in ("Linux", "macOS", "Windows", "ARM"):
        assert name in install
    metadata = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'"Operating System :: (.*)"', metadata) == ["POSIX :: Linux"]


def test_the_first_snippet_of_the_readme_ends_in_generate_and_shows_the_text():
    first = next(block for block in blocks(README) if block.language == "python")
    *_, generates, shows = first.text.strip().splitlines()
    assert "model.generate(" in generates
    assert shows.startswith("print(")


def test_the_navigation_has_every_page():
    navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    pages = (str(page.relative_to(REPOSITORY / "docs")) for page in PAGES if page.is_relative_to(REPOSITORY / "docs"))
    missing = [page for page in pages if f": {page}\n" not in navigation]
    assert not missing, f"not in mkdocs.yml: {missing}"


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs" / "api").glob("*.md")), ids=lambda page: page.stem)
def test_the_reference_names_what_exists(page):
    for module, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", page.read_text(encoding="utf-8"), re.MULTILINE):
        members = re.search(r"members: \[(.*)\]", options)
        for name in members.group(1).split(", ") if members else ():
            assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def test_the_reading_list_is_as_long_as_the_page_promises():
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| `(\S+\.py)` \|", page, re.MULTILINE)
    num_lines = sum(len((REPOSITORY / name).read_text(encoding="utf-8").splitlines()) for name in files)
    assert len(files) == 8
    assert abs(num_lines - 1800) < 100


def test_the_architecture_page_describes_every_package():
    rooms = [path.parent.name for path in (REPOSITORY / "hf_speculate").glob("*/__init__.py")]
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    missing = [room for room in rooms if not re.search(rf"\*\*.*\b{room}\b.*\*\*", page)]
    assert not missing, f"not in docs/architecture.md: {missing}"


def test_names_of_the_gpu_page_are_those_of_the_code():
    """Classes, functions and `Class.member`."""
    folders = (REPOSITORY / name for name in ("hf_speculate", "plugins", "training"))
    sources = "\n".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    defined = set(re.findall(r"^\s*(?:class|def) (\w+)", sources, re.MULTILINE))
    defined |= set(re.findall(r"^\s+(\w+): ", sources, re.MULTILINE))  # fields
    named = re.compile(r"^(?:[A-Z]\w*[a-z]\w*(?:\.\w+)?|[a-z]+(?:_[a-z]+)+)$")
    names = [span for span in spans(REPOSITORY / "docs" / "gpu.md") if named.match(span)]
    missing = sorted(name for name in names if not defined.issuperset(name.split(".")))
    assert len(names) > 20
    assert not missing, f"not in the code: {missing}"
