"""The command line: lists, versions, errors of one line, commands of other packages."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint

import pytest
import torch
import typer
from typer.testing import CliRunner

from hf_speculate_tools import cli
from hf_speculate_tools.commands import environment, machine


def run(*arguments: str):
    return CliRunner().invoke(cli.app, list(arguments))


def test_drafters_lists_the_built_in_ones():
    found = json.loads(run("drafters", "--json").stdout)
    by_name = {drafter["name"]: drafter for drafter in found}
    assert {"prompt_lookup", "draft_model"} <= set(by_name)
    assert by_name["prompt_lookup"]["object"] == "hf_speculate_plugins.prompt_lookup:PromptLookupDrafter"
    assert by_name["prompt_lookup"]["distribution"] == "hf-speculate"
    assert re.search(r"prompt_lookup +│ Drafts from the text itself +│ hf-speculate", run("drafters").stdout)


def test_env_names_versions():
    found = json.loads(run("env", "--json").stdout)
    assert found["versions"]["transformers"]
    assert found["versions"]["torch"]
    assert found["threads"] >= 1
    assert "- transformers: " in run("env").stdout


def test_environment_names_what_replaces_attention(monkeypatch):
    assert environment()["flash_attention"] == "torch"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    versions = {"flash-linear-attention": "0.5.0"}
    monkeypatch.setattr(machine, "version", lambda name: versions.get(name, "1.0"))
    facts = environment()
    assert facts["flash_attention"] == "FA4"
    assert facts["versions"]["flash-linear-attention"] == "0.5.0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "./absent"), "is not a folder here"),
        (("--target", ".", "-s", "promt_lookup"), "Did you mean 'prompt_lookup'?"),
        (("--target", ".", "-s", "prompt_lookup:depth"), "key=value"),
        (("--target", ".", "--dtype", "float12"), "unknown dtype 'float12'"),
        (("--target", ".", "--device", "abacus"), "cannot use device 'abacus'"),
        (("--target", ".", "--prompts", "absent.jsonl"), "cannot read prompts from absent.jsonl"),
    ],
)
def test_errors_are_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("bench", "generate", *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("hf-speculate: error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_absent_bundled_target_is_said_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_speculate_tools.commands.targets.bundled", lambda name: None)
    result = run("bench", "generate")
    assert result.exit_code == 1
    assert "pass --target" in result.stderr


def greet(name: str) -> None:
    """Greets."""
    typer.echo(f"hello {name}")


GROUP = typer.Typer()
GROUP.command("first")(lambda: typer.echo("one"))
GROUP.command("second")(lambda: typer.echo("two"))


def test_main_group_runs_commands_of_other_packages_and_reports_broken_ones(monkeypatch):
    class Point(EntryPoint):
        def load(self):
            if self.name == "broken":
                raise ImportError("no module named flux")
            return {"greet": greet, "group": GROUP}[self.name]

    points = {name: Point(name, f"other:{name}", cli.COMMANDS_GROUP) for name in ("greet", "group", "broken", "env")}
    monkeypatch.setattr("hf_speculate_tools.cli.groups.MainGroup.installed", lambda self: points)
    assert run("greet", "you").stdout == "hello you\n"
    assert run("group", "second").stdout == "two\n"
    shown = run("--help").stdout
    assert "greet       Provided by other:greet." in shown
    assert "broken" in shown
    assert "Greets." in run("greet", "--help").stdout
    broken = run("broken")
    assert broken.exit_code == 1
    assert "no module named flux" in broken.stderr
    assert json.loads(run("env", "--json").stdout)["versions"]  # ours wins over another package's
