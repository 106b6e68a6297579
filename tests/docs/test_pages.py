"""Pages point at what is there, and stay as short as they promise."""

from __future__ import annotations

import re

import pytest

from .pages import PAGES, README, REPOSITORY, blocks, links, name_of, spans


MAX_README = 8 * 1024
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


def test_the_readme_is_short():
    assert len(README.read_bytes()) <= MAX_README


def test_the_first_snippet_of_the_readme_ends_in_generate():
    first = next(block for block in blocks(README) if block.language == "python")
    assert "model.generate(" in first.text.strip().splitlines()[-1]


def test_the_navigation_has_every_page():
    navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    pages = (str(page.relative_to(REPOSITORY / "docs")) for page in PAGES if page.is_relative_to(REPOSITORY / "docs"))
    missing = [page for page in pages if f": {page}\n" not in navigation]
    assert not missing, f"not in mkdocs.yml: {missing}"
