"""Trees inside a grammar, with a guide over a list of sentences."""

from __future__ import annotations

import math

import pytest

from hf_speculate.tree import ROOT_PARENT, TreeRow
from hf_speculate_plugins.grammar.growth import Growth
from hf_speculate_plugins.grammar.guides import Guide
from hf_speculate_plugins.grammar.style import Style
from hf_speculate_plugins.grammar.words import Possible, Words


# Letters are content, other characters are not.
TEXTS = [bytes([code]) for code in range(128)] + [b'":', b"name", b"na", b'"n', b'", ', b'": ']
QUOTE, COLON, NAME, NA, QUOTE_COLON = ord('"'), ord(":"), 129, 130, 128


class Sentences(Guide):
    """Allows every spelling of some sentences."""

    def __init__(self, *sentences: bytes):
        self.sentences, self.said = sentences, [b""]
        self.words = Words(TEXTS, [])

    def left(self):
        said = self.said[-1]
        return [each[len(said) :] for each in self.sentences if each.startswith(said)]

    def accept(self, token):
        longer = self.said[-1] + TEXTS[token]
        if not any(each.startswith(longer) for each in self.sentences):
            return False
        self.said.append(longer)
        return True

    def back(self):
        self.said.pop()

    def possible(self):
        left = self.left()
        common = left[0] if left else b""
        while not all(each.startswith(common) for each in left):
            common = common[:-1]
        return self.words.spelling(common) if common else Possible(b"")

    def text_of(self, token):
        return TEXTS[token]


def is_text(token):
    return TEXTS[token].isalnum()


def grown(guide, style=None, tree=None, max_depth=20, most=20, last=()):
    tree = tree or TreeRow([0], [ROOT_PARENT], [0.0])
    row = Growth(guide, style or Style(), is_text, max_depth, most).grown(tree, list(last))
    assert guide.said == [b""], "the guide was not put back"
    return row


def paths(row):
    """Text of every node's path -> its probability."""
    texts, found = [b""], {}
    for node in range(1, len(row.token_ids)):
        texts.append(texts[row.parents[node]] + TEXTS[row.token_ids[node]])
        found[texts[-1]] = round(math.exp(row.values[node]), 3)
    return found


def test_the_only_text_is_drafted_with_the_longest_tokens():
    assert paths(grown(Sentences(b"name"))) == {b"name": 0.9}


def test_a_token_that_nothing_can_replace_is_certain():
    assert paths(grown(Sentences(b"}}"))) == {b"}": 1.0, b"}}": 1.0}


def test_nothing_is_added_where_the_text_branches():
    assert paths(grown(Sentences(b"ab", b"cd"))) == {}


def test_forbidden_nodes_go_with_what_is_below_them():
    #  root - x - y        "x" is forbidden, "y" below it would not be
    #       - a - (b is added)
    tree = TreeRow([0, ord("x"), ord("y"), ord("a")], [ROOT_PARENT, 0, 1, 0], [0.0, -0.1, -0.2, -1.0])
    found = paths(grown(Sentences(b"ab", b"yb"), tree=tree))
    assert found == {b"a": round(math.exp(-1), 3), b"ab": round(math.exp(-1), 3)}


def test_an_added_node_is_no_surer_than_its_parent_and_never_twice():
    tree = TreeRow([0, NAME], [ROOT_PARENT, 0], [0.0, -2.0])
    row = grown(Sentences(b'name"'), tree=tree)
    assert row.token_ids == [0, NAME, QUOTE]
    assert row.values[1] == pytest.approx(math.log(0.9)), "what must come is surer than the drafter said"
    assert row.values[2] <= row.values[1]


@pytest.mark.parametrize(("limit", "expected"), [({"max_depth": 3}, 3), ({"most": 2}, 2), ({}, 6)])
def test_grown_trees_keep_depth_and_node_limits(limit, expected):
    assert len(grown(Sentences(b"}}}}}}"), **limit).token_ids) == 1 + expected


def test_style_learns_the_token_that_crosses_the_end_of_what_is_forced():
    style, guide = Style(), Sentences(b'":', b'"]')
    assert paths(grown(guide, style)) == {b'"': 0.9}
    style.learn(guide.possible(), [NAME], QUOTE_COLON, is_text)
    found = paths(grown(guide, style, last=[NA]))
    assert next(iter(found)) == b'":'
    assert found[b'":'] == pytest.approx(1 / 1.5, abs=1e-3)


def test_style_learns_no_tokens_of_free_text():
    style, free = Style(), Possible(b"")
    style.learn(free, [NAME], NA, is_text)  # a word after a word
    assert style.proposals(free, [NAME], is_text) == []
    style.learn(free, [COLON], ord(" "), is_text)  # white space after a colon
    assert style.proposals(free, [COLON], is_text)[0][0] == ord(" ")


def test_without_text_drops_tokens_of_content():
    style = Style()
    style.learn(Possible(b'"'), [NAME], QUOTE_COLON, is_text)
    style.learn(Possible(b"name", [NAME, NA]), [QUOTE], NA, is_text)
    style.learn(Possible(b""), [COLON], NAME, is_text)
    kept = style.without_text(is_text)
    assert dict(kept.counts) == {(b'"', ()): {QUOTE_COLON: 1}}


def test_tokens_of_another_tokenizer_have_no_text():
    words = Words(TEXTS, names=[])
    assert (words.text(NAME), words.text(len(TEXTS))) == (b"name", None)


def test_spelling_knows_tokens_that_go_beyond():
    words = Words(TEXTS, names=[ord("}")])
    assert words.spelling(b'"') == Possible(b'"', [QUOTE], is_certain=False)  # '":' goes beyond
    assert words.spelling(b"name") == Possible(b"name", [NAME, NA, ord("n")], is_certain=False)
    assert words.spelling(b"]") == Possible(b"]", [ord("]")], is_certain=True)
    assert words.spelling(b"}") == Possible(b"}", [], is_certain=False)  # a name, no text
