"""Pictures of rounds: which nodes are drawn, in which colour, and errors in words."""

from __future__ import annotations

import sys

import pytest

from hf_speculate.errors import SpeculateError
from hf_speculate.tree import DraftTree, Round
from hf_speculate_tools.plots import _ACCEPTED, _OWN, _REJECTED, plot_rounds, plot_tree


pytestmark = pytest.mark.rest


def a_round(accepted: int = 2, **changes) -> Round:
    """A root with children 11 and 12; below 11 is 13, the target's own token is 14. `accepted` counts 11 and 13."""
    tree = DraftTree.from_rows([([10, 11, 12, 13], [-1, 0, 0, 1])])
    path = [0, 1, 3][: accepted + 1]
    values = {"tokens": [[*[11, 13][:accepted], 14]], "num_accepted": [accepted], "lengths": [5], "context": 5}
    return Round(tree=tree, paths=[path], **values | changes)


@pytest.fixture(autouse=True)
def no_window(monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


def test_the_tree_shows_every_node_once_and_the_accepted_path():
    axes = plot_tree(a_round())
    shown = {text.get_text(): tuple(text.xy) for text in axes.texts}
    assert {token: x for token, (x, _) in shown.items()} == {"10": 0, "11": 1, "12": 1, "13": 2, "14": 3}
    assert len(set(shown.values())) == 5, "two nodes in one place"
    assert [line.get_color() for line in axes.lines].count(_ACCEPTED) == 2
    assert [line.get_color() for line in axes.lines].count(_REJECTED) == 1
    assert [line.get_color() for line in axes.lines].count(_OWN) == 1


def test_no_star_where_the_text_ended_within_the_draft():
    axes = plot_tree(a_round(tokens=[[11, 13]]))
    assert "14" not in {text.get_text() for text in axes.texts}
    axes.figure.savefig("/dev/null", format="png")


def test_bars_are_the_tokens_of_the_rounds_without_the_prompts():
    prefill = a_round(tokens=[[10]], num_accepted=[0], is_prefill=True)
    axes = plot_rounds([prefill, a_round(2), a_round(1), a_round(0)])
    assert [bar.get_height() for bar in axes.patches] == [2, 1, 0, 1, 1, 1]
    assert axes.get_title() == "2.00 tokens per round"
    assert list(axes.lines[0].get_ydata()) == [3, 3, 3]


def test_plots_refuse_what_they_cannot_draw(monkeypatch):
    for draw in (lambda: plot_tree(a_round(), row=1), lambda: plot_rounds([a_round()], row=1), lambda: plot_rounds([])):
        with pytest.raises(SpeculateError, match="nothing to draw"):
            draw()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(SpeculateError, match=r"pip install 'hf-speculate\[plots\]'"):
        plot_tree(a_round())


def test_notebooks_show_a_round_as_text():
    assert a_round()._repr_html_().startswith("<pre>row 0: 2 of 3 drafted tokens accepted, 3 emitted\n10\n├─● 11")
