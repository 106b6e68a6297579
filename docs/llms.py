"""mkdocs hook: every page also as Markdown in the site, and `llms.txt`, the index of them (llmstxt.org).

Pages of the reference are made from docstrings, so their Markdown is empty: the index names their HTML.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


_PARAGRAPH = re.compile(r"^# .*\n+(?P<text>(?:[^-|:<!\s].*\n?)+)", re.MULTILINE)
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


def on_post_build(config: Any) -> None:
    """Copies the pages and writes the index.

    Args:
        config: mkdocs' configuration: `docs_dir`, `site_dir`, `nav`, `site_name` and `site_description`.
    """
    pages, site = Path(config["docs_dir"]), Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for section, entries in _sections(config["nav"]):
        lines += ["", f"## {section}", ""]
        for title, name in entries:
            text = (pages / name).read_text(encoding="utf-8")
            target = name.removesuffix(".md") + ".html" if "\n::: " in text else name
            if target == name:
                (site / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(pages / name, site / name)
            lines.append(f"- [{title}]({target}){_about(text)}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sections(nav: list[Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Sections of the navigation with titles and files of their pages; pages of no section come first."""
    named = [next(iter(entry.items())) for entry in nav]
    yield "Start", [(title, name) for title, name in named if isinstance(name, str)]
    for section, entries in named:
        if not isinstance(entries, str):
            yield section, [next(iter(entry.items())) for entry in entries]


def _about(text: str) -> str:
    """The first sentence of a page, after a colon; "" if the page begins with something else."""
    found = _PARAGRAPH.search(text)
    sentence = re.split(r"(?<=\.)\s", " ".join(found["text"].split()), maxsplit=1)[0] if found else ""
    return ": " + _LINK.sub(r"\1", sentence) if sentence else ""
