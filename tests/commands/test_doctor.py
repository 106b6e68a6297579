"""`hf-speculate doctor`: what a round needs and yields, and the advice that follows."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hf_speculate_tools import cli
from hf_speculate_tools.cli.doctor import advise, fallbacks_of

from ..docs.pages import REPOSITORY


PYCODER, HEAD = (str(REPOSITORY / "examples" / name) for name in ("pycoder", "pycoder-eagle3"))


def row(drafter, token_ms, speedup, backend=""):
    return {"drafter": drafter, "token_ms": token_ms, "speedup": speedup, "backend": backend}


@pytest.mark.rest
def test_doctor_measures_the_bundled_code_model():
    options = ("doctor", "-t", PYCODER, "-s", HEAD, "-s", "prompt_lookup", "--dtype", "float32")
    shown = CliRunner().invoke(cli.app, options)
    assert shown.exit_code == 0, shown.stderr
    assert "to break even" in shown.stdout
    *_, advice, line = shown.stdout.strip().splitlines()
    assert advice.startswith(("Take --speculator", "Run plain"))
    found = json.loads(line)
    assert 2 <= found["num_prompts"] <= 8
    head, lookup = found["rows"]
    assert head["rounds"] >= 10
    assert head["yields"] > 2
    assert head["recorded"] == pytest.approx(4.09, abs=0.01)
    assert head["needed"] == pytest.approx(head["round_ms"] / head["token_ms"], rel=1e-3)
    assert head["speedup"] > 0
    assert lookup["recorded"] is None
    assert head["fallback"] == lookup["fallback"] == ""


def test_fallbacks_of_rows_name_backend_and_drafter():
    rows = [
        row("a", 10, 1.5, "native") | {"fallback": "8 of 8 forwards of the target were eager, not native: autocast."}
    ]
    rows += [row("b", 10, 1.5) | {"fallback": ""}, row("c", 10, 1.5) | {"fallback": "beams."}]
    assert fallbacks_of(rows) == [
        "native a: 8 of 8 forwards of the target were eager, not native: autocast.",
        "c: beams.",
    ]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("a", 10, 1.5), row("b", 10, 2.0)], "Take --speculator b: about 2.00x, from 100 to 200 tokens/s."),
        ([row("a", 10, 1.02), row("b", 10, None)], "Run plain (100 tokens/s): no drafter clearly yields more"),
        ([row("a", 10, 1.9, "native"), row("a", 5, 0.8, "native-int8")], "Run plain --gguf-backend native-int8 (200"),
        ([row("a", 10, 1.9, "native"), row("a", 8, 1.8, "native-int8")], "a --gguf-backend native-int8: about 1.80x"),
    ],
)
def test_advise_names_the_fastest_choice(rows, said):
    assert said in advise(rows)
