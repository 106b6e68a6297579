"""The reader of JSON text: the same place however the text is cut, and none in what is no JSON."""

from __future__ import annotations

import pytest

from hf_speculate_plugins.suffix.json_text import JsonText, Place


def read(text, size=None):
    """The reader after pieces of `size` characters; None: all at once."""
    reader = JsonText()
    for at in range(0, len(text), size or len(text) or 1):
        reader.feed(text[at : at + size] if size else text)
    return reader


def keys(reader):
    return [] if reader.level is None else [name for name, _ in reader.level.values]


TEXTS = [
    ('{"a": 1, "b', Place.KEY, ["a"]),
    ('{"a": "x", "b"', Place.AFTER_KEY, ["a"]),
    ('{"a": {"c": [1, {"d": 2}]}, "b": ', Place.BEFORE_VALUE, ["a"]),
    ('{"a": {"c": [1, {"d": ', Place.BEFORE_VALUE, []),
    (r'{"a": "q\"}\\", "b": tru', Place.WORD, ["a"]),
    (r'{"a": "ends \\\"', Place.STRING, []),
    ('{"a": "größe 🙂 {", "b": -1.5e3}, {"c": null, "d": [', Place.BEFORE_VALUE, []),
    ('{"a": [[1, 2], [3', Place.WORD, []),
    ("{}", Place.AFTER_VALUE, []),
]


@pytest.mark.parametrize(("text", "place", "names"), TEXTS)
@pytest.mark.parametrize("size", [1, 3, None])
def test_pieces_of_any_size_lead_to_the_same_place(text, place, names, size):
    reader = read(text, size)
    assert (reader.place, keys(reader)) == (place, names)
    assert reader == read(text)


def test_values_are_kept_as_they_were_written():
    reader = read(r'{"a": "q\"}\\", "gr\u00f6\u00dfe": 1.5, "c": {"d": 1}, "e": [1, "x"], "f": true, ')
    found = (("a", r'"q\"}\\"'), ("größe", "1.5"), ("c", ""), ("e", ""), ("f", "true"))
    assert reader.level is not None
    assert reader.level.values == found


@pytest.mark.parametrize(
    "text", ["{x = 1", "{'a': 1", '{"a" 1', '{"a": 1 2', '{"a": [1}', '{"a\nb', '{"a": "x\n', "{]", "{:"]
)
def test_reader_skips_text_that_is_no_json(text):
    assert read(text).level is None
    reader = read(text + ' {"b": 1')
    assert (reader.place, reader.word) == (Place.WORD, "1")


def test_the_style_is_learnt():
    assert (read('{"a":1,"b":').colon, read('{"a":1,"b":').comma) == ("", "")
    assert (read('{"a": 1, "b": 2').colon, read('{"a": 1, "b": 2').comma) == (" ", " ")
    reader = read('{\n\t"a": [1, 2],\n\t"b": ')
    assert reader.level is not None
    assert (reader.level.gap, reader.comma, reader.gap) == ("\n\t", " ", " ")


def test_reader_keeps_the_text_between_objects():
    reader = read('Now.\n<call>\n{"a": 1}\n</ca')
    assert (reader.level, reader.lead) == (None, "Now.\n<call>\n")
    reader.feed('ll>\n<call>\n{"b": 1')
    assert reader.lead == "\n</call>\n<call>\n"
    reader.feed("}" + " words" * 20)
    assert reader.lead == "\n</call>\n<call>\n"


def test_a_copy_goes_on_alone():
    reader = read('{"a": ')
    copy = reader.copy()
    copy.feed('1, "b": ')
    assert (keys(reader), keys(copy)) == ([], ["a"])


def test_long_strings_are_not_kept():
    reader = JsonText()
    reader.feed('{"a": "')
    for _ in range(100):
        reader.feed("long text " * 10)
    assert len(reader.word) < 1000
    reader.feed('", "b')
    assert reader.place == Place.KEY
