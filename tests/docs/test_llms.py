"""The site's index for language models: every page of the navigation, as Markdown that lies beside the index."""

from __future__ import annotations

import importlib.util
import re

import pytest
import yaml

from .pages import REPOSITORY


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """What the hook writes."""
    spec = importlib.util.spec_from_file_location("llms", REPOSITORY / "docs" / "llms.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    place = tmp_path_factory.mktemp("site")
    config = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    hook.on_post_build(config | {"docs_dir": REPOSITORY / "docs", "site_dir": place})
    return place


def test_every_page_is_in_the_index_and_beside_it(site):
    index = (site / "llms.txt").read_text(encoding="utf-8")
    named = dict(re.findall(r"^- \[.*?\]\((.*?)\)(.*)$", index, re.MULTILINE))
    pages = {str(page.relative_to(REPOSITORY / "docs")) for page in (REPOSITORY / "docs").rglob("*.md")}
    reference = {page for page in pages if page.startswith("api/")}
    assert set(named) == pages - reference | {page.replace(".md", ".html") for page in reference}
    for page in pages - reference:
        assert (site / page).read_bytes() == (REPOSITORY / "docs" / page).read_bytes()


def test_the_index_says_what_a_page_is_about(site):
    index = (site / "llms.txt").read_text(encoding="utf-8")
    assert index.startswith("# hf_speculate\n\n> Speculative decoding for transformers.")
    assert (
        "\n## Guides\n\n- [Choosing a drafter](choosing-a-drafter.md): After this page you know what to pass" in index
    )
    assert not re.search(r"\): .*\]\(", index), "a link within a sentence"
    without = [
        line for line in index.splitlines() if line.startswith("- ") and not re.search(r"\): [\w`].*[.:]$", line)
    ]
    assert [line for line in without if "(api/" not in line] == []
