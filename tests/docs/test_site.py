"""The site builds strictly and without network, and nothing on it is loaded from elsewhere. Needs the extra `docs`."""

from __future__ import annotations

import re
import socket
import warnings

import pytest

from .pages import REPOSITORY


build = pytest.importorskip("mkdocs.commands.build", reason="mkdocs is not installed: pip install 'hf-speculate[docs]'")

# What a browser fetches by itself; links (`<a href>`) are not.
_LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"' >]+)|<link\b[^>]*\bhref=[\"']?([^\"' >]+)"
)
_ELSEWHERE = re.compile(r"^(?:https?:)?//")


def loaded_from_elsewhere(page: str) -> list[str]:
    return [url for pair in _LOADED.findall(page) for url in pair if _ELSEWHERE.match(url)]


def test_site_builds_offline_and_loads_nothing_from_elsewhere(tmp_path, monkeypatch):
    def no_network(*_arguments, **_options):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    from mkdocs.config import load_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries that the theme uses
        build.build(load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert "- [Does it help me?](does-it-help.md)" in (tmp_path / "llms.txt").read_text()
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    foreign = {page.name: found for page in pages if (found := loaded_from_elsewhere(page.read_text()))}
    assert not foreign


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://unpkg.com/mermaid"></script>',
        "<link rel=preconnect href=https://fonts.gstatic.com crossorigin>",
        '<img alt="" src="//example.org/a.png">',
    ],
)
def test_loaded_from_elsewhere_finds_foreign_files(tag):
    assert loaded_from_elsewhere(tag)
    assert not loaded_from_elsewhere('<a href="https://example.org"><img src="rooms.svg"><link href="assets/a.css">')
