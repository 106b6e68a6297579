"""The notebook runs from a clean clone: cell by cell, with the bundled model, without a kernel."""

from __future__ import annotations

import json

import pytest

from .pages import REPOSITORY


NOTEBOOK = json.loads((REPOSITORY / "examples" / "first-steps.ipynb").read_text(encoding="utf-8"))
SHORTER = {"max_steps=24": "max_steps=4", "logging_steps=4": "logging_steps=2", 'tokens": 96': 'tokens": 48'}
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_notebook_has_no_outputs():
    assert not [cell for cell in CODE if cell["outputs"] or cell["execution_count"]]


@pytest.mark.rest
def test_the_notebook_runs(monkeypatch, tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(REPOSITORY / "examples")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = {"__name__": "notebook"}
    for number, cell in enumerate(CODE):
        source = "".join(cell["source"])
        for whole, shorter in SHORTER.items():
            source = source.replace(whole, shorter)
        exec(compile(source, f"cell {number}", "exec"), names)
    assert len(set(names["texts"].values())) == 1
    assert all(length > 1 for length in names["lengths"].values())
    assert [step for step, _ in names["history"]] == [2, 4]
    assert names["speculator"].stats.calls == 1
    assert len(pyplot.get_fignums()) == 4
    pyplot.close("all")
