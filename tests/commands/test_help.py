"""Help of the command line: it starts without torch, is complete at 80 columns, and says the same everywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hf_speculate_tools.cli import app
from hf_speculate_tools.overview import COMMANDS, overview, version_line


HEAVY = {"torch", "transformers", "datasets", "numpy", "accelerate", "peft", "hf_speculate", "typer", "rich"}
ABOUT = {name: about for commands in COMMANDS.values() for name, about in commands.items()}
COLUMNS = 80

FRONT = """
import os, sys
from hf_speculate_tools.front import main
try:
    main()
finally:
    with open(os.environ["LOADED"], "w") as file:
        print(*{name.partition(".")[0] for name in sys.modules}, file=file)
"""


def run_front(folder, *arguments: str) -> tuple[subprocess.CompletedProcess, set[str]]:
    """Calls the function of the console script in a fresh interpreter; returns also the packages that it imported."""
    loaded = folder / "loaded"
    command, environment = [sys.executable, "-c", FRONT, *arguments], {**os.environ, "LOADED": str(loaded)}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    return done, set(loaded.read_text().split())


class TestOverview:
    @pytest.mark.parametrize(
        ("arguments", "status"), [(("--help",), 0), (("-h",), 0), ((), 2), (("--help", "generate"), 0)]
    )
    def test_overview_is_printed_without_heavy_imports(self, tmp_path, arguments, status):
        done, loaded = run_front(tmp_path, *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (status, overview(), "")
        assert not loaded & HEAVY

    def test_version_comes_without_heavy_imports(self, tmp_path):
        done, loaded = run_front(tmp_path, "--version")
        assert (done.returncode, done.stdout, done.stderr) == (0, version_line(), "")
        assert not loaded & HEAVY

    def test_other_arguments_go_to_the_app(self, tmp_path):
        done, loaded = run_front(tmp_path, "--verson")
        assert done.returncode == 2
        assert "No such option: --verson" in done.stderr
        assert "typer" in loaded
        assert not loaded & {"torch", "transformers"}

    @pytest.mark.parametrize("arguments", [(), ("--help",), ("--version",)])
    def test_app_prints_the_same_overview_and_version(self, arguments):
        shown = CliRunner().invoke(app, list(arguments))
        assert shown.stdout == (version_line() if "--version" in arguments else overview())
        assert shown.exit_code == (0 if arguments else 2)

    def test_help_survives_a_closed_pipe_and_reports_a_full_disk(self, tmp_path):
        command = [sys.executable, "-c", "from hf_speculate_tools.front import main; main()", "--help"]
        read, write = os.pipe()
        os.close(read)
        gone = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=tmp_path, text=True)
        os.close(write)
        assert (gone.returncode, gone.stderr) == (1, "")
        if os.path.exists("/dev/full"):
            with open("/dev/full", "w") as full:
                failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=tmp_path, text=True)
            assert failed.returncode == 1
            assert failed.stderr.startswith("hf-speculate: error: cannot write to stdout: ")

    def test_lists_every_command_with_its_own_words(self):
        root = typer.main.get_command(app)
        context = root.context_class(root)
        assert set(root.list_commands(context)) >= set(ABOUT)
        texts = {name: root.get_command(context, name).help for name in ABOUT}
        assert {name: " ".join(text.partition("\n\n")[0].split()) for name, text in texts.items()} == ABOUT

    def test_names_commands_of_other_packages_and_imports_none(self):
        points = [EntryPoint(name, f"other:{name}", "x") for name in ("zap\x1b[2J", "a-very-long-name", "train")]
        shown = overview(points)
        assert "\n  zap\\x1b[2J  Provided by other:zap\\x1b[2J.\n" in shown
        assert "\n  a-very-long-name\n" + " " * 14 + "Provided by other:a-very-long-name.\n" in shown
        assert shown.count("  train ") == 1

    def test_overview_fits_the_columns(self):
        lines = overview([]).splitlines()
        assert max(map(len, lines)) <= COLUMNS
        assert "Other packages" not in overview([])


def commands(command: Any, context: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands and groups, with the words that name them."""
    yield path, command
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        child = command.get_command(context, name)
        yield from commands(child, child.context_class(child), (*path, name))


@pytest.mark.rest  # imports every command
class TestHelpOfCommands:
    @pytest.fixture(scope="class")
    @classmethod
    def everything(cls):
        root = typer.main.get_command(app)
        return [(path, command) for path, command in commands(root, root.context_class(root)) if path]

    @pytest.fixture
    def shown(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", str(COLUMNS))

        def show(path: tuple[str, ...]) -> str:
            result = CliRunner().invoke(app, [*path, "--help"])
            assert (result.exit_code, result.stderr) == (0, ""), path
            return result.stdout

        return show

    def test_no_name_is_cut_off(self, everything, shown):
        assert len(everything) > len(ABOUT)
        for path, command in everything:
            text = shown(path)
            assert "…" not in text, path
            for name in (name for param in command.params for name in (*param.opts, *param.secondary_opts)):
                assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text), (path, name)

    def test_lines_fit_except_examples(self, everything, shown):
        for path, _ in everything:
            lines = [line for line in shown(path).splitlines() if not line.startswith("    hf-speculate ")]
            assert max(map(len, lines)) <= COLUMNS, path

    def test_every_option_has_a_sentence(self, everything):
        for path, command in everything:
            assert command.help.partition("\n\n")[0].rstrip().endswith("."), path
            for param in command.params:
                assert (param.help or "").rstrip().endswith("."), (path, param.name)


@pytest.mark.rest  # a process each, seconds of imports
@pytest.mark.parametrize("path", ["bench generate", "regenerate"])
def test_help_prints_nothing_to_stderr(tmp_path, path):
    done, _ = run_front(tmp_path, *path.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
