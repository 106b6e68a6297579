"""The start of a command: help, and errors that need no model, come before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


# Each takes seconds to import; `hf_speculate` stands for the engine as a whole.
HEAVY = ("torch", "transformers", "datasets", "numpy", "accelerate", "peft", "safetensors", "hf_speculate")

# Goes through all commands of this distribution; prints the heavy modules that each left behind.
WALK = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from hf_speculate_tools.front import import_light
import_light()
import typer
from hf_speculate_tools.cli import app
from hf_speculate_tools.overview import DISTRIBUTION

def names(command, context, is_root):
    points = command.installed() if is_root else {}
    return [name for name in command.list_commands(context)
            if name not in points or points[name].dist.name == DISTRIBUTION]

def walk(command, context, path=()):
    for words in (["--help"], ["--no-such-option"]):
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            try:
                app([*path, *words])
            except SystemExit as end:
                status = end.code
        shown = (out if words == ["--help"] else err).getvalue()
        found[" ".join([*path, *words])] = [status, shown, [name for name in HEAVY if name in sys.modules]]
    for name in names(command, context, not path) if hasattr(command, "list_commands") else ():
        child = command.get_command(context, name)
        walk(child, child.context_class(child), (*path, name))

found, HEAVY = {}, sys.argv[1:]
root = typer.main.get_command(app)
walk(root, root.context_class(root))
print(json.dumps(found))
"""

# Runs command lines as the script does, all in one process; prints status, standard error and heavy modules of each.
CALLS = """
import io, json, sys
from contextlib import redirect_stderr
from hf_speculate_tools.front import main
found, (heavy, calls) = [], json.loads(sys.argv[1])
for words in calls:
    sys.argv = ["hf-speculate", *words]
    with redirect_stderr(io.StringIO()) as err:
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code
    found.append([status, err.getvalue(), [name for name in heavy if name in sys.modules]])
print(json.dumps(found))
"""

# What a command of another package finds: the engine, whole and patched in.
LATER = """
from hf_speculate_tools.front import import_light
import_light()
from hf_speculate.errors import SpeculateError
from hf_speculate.speculator.registry import SpeculatorSpec
import hf_speculate, hf_speculate_gguf, transformers
assert hf_speculate.errors.SpeculateError is hf_speculate.SpeculateError is SpeculateError
assert hf_speculate.speculator.registry.SpeculatorSpec is hf_speculate.speculator.SpeculatorSpec is SpeculatorSpec
assert hf_speculate.files.user_path and hf_speculate.messages.message and hf_speculate_gguf.named.NAMED_TARGETS
print(transformers.GenerationMixin.generate.__code__.co_filename)
"""


def run(code: str, *arguments: str, folder: Any = None) -> Any:
    """Standard output of a script in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def walked() -> dict[str, tuple[int, str, list[str]]]:
    return json.loads(run(WALK, *HEAVY))


def test_help_and_unknown_options_of_every_command_need_no_torch(walked):
    assert {"generate --help", "bench acceptance --help", "train --help", "mtp keep --no-such-option"} <= set(walked)
    assert not {line: heavy for line, (_, _, heavy) in walked.items() if heavy}


def test_every_command_answers(walked):
    for line, (status, shown, _) in walked.items():
        if line.endswith("--help"):
            assert (status, "Usage: " in shown) == (0, True), line
        else:
            assert (status, "No such option: --no-such-option" in shown) == (2, True), line


CODER = ("--target", ".")  # a folder that is there
ERRORS = {
    ("generate", "hi", "-t", "./absent"): "'./absent' is not a folder here",
    ("generate", "hi", "-t", "absent.d"): "cannot load target 'absent.d': no such folder here",
    ("generate", "hi", "-t", "./absent.gguf"): "cannot load target './absent.gguf': no such file",
    ("generate", "hi", *CODER, "-s", "sufix"): "unknown drafter 'sufix'. Did you mean 'suffix'?",
    ("generate", "hi", *CODER, "-s", "./absent"): "'./absent' is not a folder",
    ("generate", "hi", *CODER, "-s", "suffix:depth"): "options are NAME:key=value",
    ("generate", "hi", *CODER, "-s", "none", "--stats"): "--speculator none turns it off",
    ("generate", "hi", *CODER, "-s", "none", "--show-drafts"): "--speculator none turns it off",
    ("generate", "hi", *CODER, "--temperature", "-1"): "temperature -1.0: possible are 0",
    ("generate", "hi", *CODER, "--temperature", "0", "--top-k", "3"): "nothing to choose from",
    ("generate", "hi", *CODER, "--dtype", "float12"): "unknown dtype 'float12'",
    ("generate", "hi", *CODER, "--gguf-backend", "dense"): "--gguf-backend is for GGUF files",
    ("chat", "-t", "./absent"): "is not a folder here",
    ("doctor", "-t", "./absent"): "is not a folder here",
    ("doctor", *CODER, "-s", "sufix"): "unknown drafter 'sufix'",
    ("doctor", *CODER, "--gguf-backend", "dense"): "--gguf-backend is for GGUF files",
    ("bench", "generate", *CODER, "--prompts", "absent.jsonl"): "cannot read prompts from absent.jsonl",
    ("bench", "batch", "-t", "./absent"): "is not a folder here",
    ("bench", "acceptance", *CODER, "-s", "suffix", "-s", "suffix"): "two speculators have the same name",
    ("bench", "generate", *CODER, "--gguf-backend", "dense"): "--gguf-backend is for GGUF files",
    ("check", "./absent", *CODER): "'./absent' is not a folder",
    ("check", ".", "-t", "./absent"): "is not a folder here",
    ("convert", "./absent", "new", "--layout", "compact"): "'./absent' is not a folder",
    ("convert", ".", "new"): "pass one of --layout and --for",
    ("convert", ".", ".", "--layout", "compact"): "is not an empty folder",
    ("push", "absent"): "absent is not a folder of a head",
    ("card", "absent"): "absent is not a folder of a head",
    ("mtp", "keep", "absent", "absent"): "absent has no config.json of a model",
    ("drafters", "sufix"): "unknown drafter 'sufix'",
    ("regenerate", *CODER, "--output", "new"): "either --data or --self-prompts",
    ("regenerate", *CODER, "--output", "new", "--data", "absent.jsonl"): "no such file or folder",
    ("regenerate", *CODER, "--output", "new", "--data", "here.txt", "--engine", "server"): "--server is required",
    ("regenerate", *CODER, "--output", "new", "--data", "here.txt", "--column", "x"): "it must be OURS=THEIRS",
    ("train", *CODER): "--data must be given",
    ("train", *CODER, "--data", "absent.jsonl"): "cannot read the data 'absent.jsonl': no such file or folder",
    ("train", *CODER, "--data", "here.txt", "--method", "egle3"): "Did you mean 'eagle3'?",
    ("train", "--config", "absent.yaml"): "cannot read the recipe absent.yaml",
    ("train", "--config", "pycoder-eagl"): "unknown recipe 'pycoder-eagl'. Did you mean",
    ("train", *CODER, "--config", "pycoder-eagle3", "--init", "-"): "--init writes a recipe as it is",
}


def test_errors_that_need_no_model_need_no_torch(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "here.txt").write_text("a text")
    found = json.loads(run(CALLS, json.dumps([HEAVY, [*ERRORS]]), folder=tmp_path))
    for (words, message), (status, shown, heavy) in zip(ERRORS.items(), found, strict=True):
        assert (status, shown.count("\n"), message in shown) == (1, 1, True), (words, shown)
        assert not heavy, words


@pytest.mark.rest  # a process that imports torch
def test_import_light_leaves_packages_importable():
    assert "hf_speculate" in run(LATER)
