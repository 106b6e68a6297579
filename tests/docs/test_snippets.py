"""What the documentation shows runs: Python as it stands, page by page; command lines name what there is.

A block that cannot run here says why in a comment before it, `<!-- not run: needs ... -->`: it must be Python all the
same, and import what exists. A block of `text` behind `<!-- prints -->` is what the Python before it prints:
`HF_SPECULATE_WRITE_DOCS=1 pytest tests/docs` writes it anew.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer

from hf_speculate.cache import CACHE_NAME
from hf_speculate_tools.cli import app

from ..support.tiers import quick
from .pages import PAGES, REPOSITORY, Block, blocks, name_of, spans


OURS = ("hf_speculate", "hf_speculate_plugins", "hf_speculate_tools", "hf_speculate_training")
PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
NOT_RUN = [block for page in PAGES for block in blocks(page) if block.reason is not None]
_SEPARATORS = ("&&", ";", "|")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A working directory that looks like the root of the repository, and into which snippets may write."""
    for entry in REPOSITORY.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    # Where transformers copies code of `custom_generate=` to.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / ".modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def run_page(page: Path) -> list[tuple[Block, str]]:
    """Runs the Python of a page in one namespace; returns the blocks that show what is printed, and what is."""
    namespace: dict[str, Any] = {"__name__": name_of(page)}
    shown, printed = [], ""
    for block in blocks(page):
        if block.reason is not None:
            printed = None
        elif block.language == "python":
            with redirect_stdout(io.StringIO()) as output:
                # Tracebacks name the page and the line in it.
                exec(compile("\n" * (block.line - 1) + _for_installed(block.text), str(page), "exec"), namespace)
            printed = output.getvalue()
        elif block.note == "prints" and printed is not None:
            shown.append((block, "".join(f"{line.rstrip()}\n" for line in printed.splitlines())))
    return shown


def _for_installed(text: str) -> str:
    """Pages call the cache what the newest transformers calls it."""
    return text.replace("cache=first.cache", f"{CACHE_NAME}=first.{CACHE_NAME}")


def write_outputs(page: Path, shown: list[tuple[Block, str]]) -> None:
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for block, printed in reversed(shown):
        lines[block.line - 1 : block.line - 1 + block.text.count("\n")] = printed.splitlines(keepends=True)
    page.write_text("".join(lines), encoding="utf-8")


QUICK = [page for page in PYTHON if page.name in ("README.md", "how-a-round-works.md", "writing-a-drafter.md")]


@pytest.mark.parametrize("page", quick(PYTHON, *QUICK), ids=name_of)
def test_snippets_run_and_print_what_the_page_says(page, checkout):
    shown = run_page(page)
    if os.environ.get("HF_SPECULATE_WRITE_DOCS"):
        write_outputs(page, shown)
        return
    for block, printed in shown:
        assert block.text == printed, f"{block.place} is stale: run with HF_SPECULATE_WRITE_DOCS=1"


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: block.place)
def test_what_is_not_run_says_why_and_imports_what_exists(block):
    assert len(block.reason.split()) > 1, f"{block.place}: no reason"
    if block.language == "python":
        check_imports(block)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "examples").rglob("*.py")), ids=lambda path: path.name)
def test_examples_import_what_exists(path):
    """Of the demo, too, which no other test runs."""
    for module, name in imported(path.read_text(encoding="utf-8")):
        if module.partition(".")[0] in OURS:
            assert name is None or hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def imported(text: str) -> Iterator[tuple[str, str | None]]:
    """(module, name in it or None) of every import; relative ones are left out."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


def check_imports(block: Block) -> None:
    """Raises `AssertionError` for names that are not there. A package that is not installed is named in the reason."""
    for module, name in imported(block.text):
        package = module.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            assert package not in OURS
            assert package in (block.reason or ""), f"{block.place}: {package} is not installed: a typing error?"
        else:
            found = importlib.import_module(module)
            assert name is None or hasattr(found, name), f"{block.place}: {module} has no {name}"


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of every call of `hf-speculate` in shell text."""
    for line in text.replace("\\\n", " ").splitlines():
        if "hf-speculate" not in line:
            continue
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word not in _SEPARATORS:
                words.append(word)
                continue
            while words and "=" in words[0]:  # variables of the environment
                words.pop(0)
            if words and words[0] == "hf-speculate":
                yield words[1:]
            words = []


def check_command(words: list[str]) -> None:
    """Raises an error of click's or `AssertionError` for sub-commands and options that are not there."""
    command: Any = typer.main.get_command(app)
    words = [word for word in words if word not in ("...", "…")]
    while words and hasattr(command, "get_command") and not words[0].startswith("-"):
        name = words.pop(0)
        found = command.get_command(command.context_class(command), name)
        assert found is not None, f"no command {name!r} in {command.name!r}"
        command = found
    command.make_parser(command.context_class(command)).parse_args(words)


def commands_of(page: Path) -> list[tuple[str, list[str]]]:
    """(place, words) of every call of `hf-speculate` on a page."""
    shell = [block for block in blocks(page) if block.language in ("", "bash") and block.reason is None]
    found = [(block.place, words) for block in shell for words in command_lines(block.text)]
    for span in spans(page):
        if span.startswith("hf-speculate "):
            found.extend((name_of(page), words) for words in command_lines(span))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_documented_commands_exist(page):
    for place, words in commands_of(page):
        try:
            check_command(list(words))
        except Exception as error:
            problem = getattr(error, "message", None) or error
            pytest.fail(f"{place}: hf-speculate {' '.join(words)}: {problem}", pytrace=False)


class TestTheChecksCanFail:
    @staticmethod
    def page(tmp_path, text):
        (tmp_path / "page.md").write_text(text)
        return tmp_path / "page.md"

    def test_snippets_share_a_namespace_and_are_compared_with_what_they_print(self, tmp_path):
        text = "```python\nx = 3\n```\n\n```python\nprint(x)\n```\n\n<!-- prints -->\n```text\n4\n```\n"
        page = self.page(tmp_path, text)
        ((block, printed),) = run_page(page)
        assert (block.text, printed) == ("4\n", "3\n")
        write_outputs(page, [(block, printed)])
        assert page.read_text() == text.replace("4", "3")

    def test_an_error_names_the_line_of_the_page(self, tmp_path):
        page = self.page(tmp_path, "Text.\n\n```python\nx = 1\nx.missing\n```\n")
        with pytest.raises(AttributeError) as caught:
            run_page(page)
        assert caught.traceback[-1].lineno + 1 == 5

    @pytest.mark.parametrize(
        "code",
        ["from hf_speculate import Speculater", "import hf_speculate.nothing", "import a_package_of_nobody"],
    )
    def test_check_imports_refuses_names_that_do_not_exist(self, tmp_path, code):
        (block,) = blocks(self.page(tmp_path, f"<!-- not run: needs a GPU -->\n```python\n{code}\n```\n"))
        with pytest.raises((AssertionError, ImportError)):
            check_imports(block)

    @pytest.mark.parametrize(
        "line", ["hf-speculate bensh", "hf-speculate bench generate --quik", "hf-speculate check HEAD --target"]
    )
    def test_check_command_refuses_unknown_commands_and_options(self, line):
        (words,) = command_lines(line)
        with pytest.raises(Exception, match=r"No such|no command|requires an argument"):
            check_command(words)

    def test_commands_are_found_in_blocks_and_in_the_text(self, tmp_path):
        text = "`hf-speculate env`:\n\n    X=1 hf-speculate \\\n      drafters  # all\n\n"
        text += "```bash\ncd x && hf-speculate train\n```\n"
        found = [words for _, words in commands_of(self.page(tmp_path, text))]
        assert sorted(found) == [["drafters"], ["env"], ["train"]]
