"""The demo: what it shows where SmolLM2 is not installed, and its figures as JSON."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from ..docs.pages import REPOSITORY


pytestmark = pytest.mark.rest


@pytest.fixture
def demo(monkeypatch, capsys):
    """Runs the demo with arguments, without SmolLM2; what it printed."""
    spec = importlib.util.spec_from_file_location("demo", REPOSITORY / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)  # dataclasses look for it
    spec.loader.exec_module(module)
    monkeypatch.setattr("hf_speculate_gguf.named._file_in_package", lambda *_: None)
    monkeypatch.setattr(module, "others_at_work", lambda: 0.0)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["demo.py", "--tokens", "24", "--repeats", "1", *arguments])
        module.main()
        return capsys.readouterr().out

    return run


def test_demo_without_smollm2_says_so_and_names_the_next_command(demo):
    lines = demo().splitlines()
    assert lines[0].startswith("smollm2 is not on this machine (pip install")
    assert [line for line in lines if line.startswith("1. pycoder")]
    assert not [line for line in lines if line.startswith(("2.", "{"))]
    (top,) = [line for line in lines if "plain ─" in line]
    left, right = top.split("╮ ╭")
    assert len(left) == len(right), "panels of equal width"
    assert "drafted tokens accepted" in "\n".join(lines)
    assert lines[-1].startswith("next: ")


def test_a_busy_machine_is_named(demo, monkeypatch):
    monkeypatch.setattr(sys.modules["demo"], "others_at_work", lambda: 3.0)
    assert demo("--seconds", "1").startswith("This machine is busy: 3 other processes want its ")


def test_json_has_the_figures_of_every_block_and_nothing_else_is_printed(demo):
    (block,) = json.loads(demo("--json"))["blocks"]
    plain, ours = block["rows"]
    assert (plain["way"], ours["way"]) == ("transformers", "EAGLE-3 head + suffix")
    assert ours["new_tokens"] == plain["new_tokens"] == 24
    assert ours["mean_acceptance_length"] > 1.5
    for request in ("greedy", "temperature 0.8"):
        assert plain[request]["same_text"] is None
        assert ours[request]["same_text"] in (True, "proven tie")
