"""JSON from anywhere is read within bounds; files are written whole or not at all."""

from __future__ import annotations

import json
import os

import pytest

from hf_speculate import files
from hf_speculate.errors import CheckpointError
from hf_speculate.files import check_kinds, check_regular, json_writer, read_json, replace_files, text_writer


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100000 + b"]" * 100000, "nested too deeply"),
        (b'{"a":' * 100000 + b"1" + b"}" * 100000, "nested too deeply"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "deeper than 64 levels"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer of 5000 digits"),
        (b'{"a": ' + b"9" * 60 + b"}", "an integer of 60 digits"),
        ("{}".encode("utf-16"), "cannot read"),
        (b"[5]", "holds a list, expected an object"),
        (b"{", "cannot read"),
        (b"", "cannot read"),
    ],
    ids=range(9),
)
def test_json_that_is_none_or_too_much_is_refused(content, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_json(path)


def test_a_file_larger_than_asked_for_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"a": "x" * (1 << 20)}))
    with pytest.raises(CheckpointError, match="more than 1 MB"):
        read_json(path, 1 << 20)
    assert read_json(path, 2 << 20)["a"]
    os.truncate(path, 1 << 40)  # sparse: nobody has as much memory
    with pytest.raises(CheckpointError, match="more than 64 MB"):
        read_json(path)


def test_half_a_character_is_no_text(tmp_path):
    (tmp_path / "config.json").write_text(r'{"a": "\ud83d\ude00 \\ud800"}')
    assert read_json(tmp_path / "config.json") == {"a": "\U0001f600 \\ud800"}
    (tmp_path / "config.json").write_text(r'{"a": "\ud800"}')
    with pytest.raises(CheckpointError, match="surrogates not allowed"):
        read_json(tmp_path / "config.json")


def test_values_of_other_kinds_are_named(tmp_path):
    kinds = {"a": dict, "a.b": int, "c": str}
    for content in ({}, {"a": None, "c": "x"}, {"a": {"b": 5}}):
        check_kinds("file", content, kinds)
    for content, message in (
        ({"a": [1]}, r"file: a is \[1\], expected an object"),
        ({"a": {"b": True}}, "a.b is True, expected an integer"),
        ({"a": {"b": "x" * 99}}, "a.b is 'x{59} ..., expected an integer"),
        ({"c": 5}, "c is 5, expected a text"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_kinds("file", content, kinds)


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "folder", "loop", "absent", "a\0b"):
        for read in (read_json, check_regular):
            with pytest.raises(CheckpointError, match="cannot read"):
                read(tmp_path / name)


def test_integers_as_wide_as_configs_have_them_are_read(tmp_path):
    """`model_max_length` of many tokenizers is 1e30 as an integer."""
    (tmp_path / "config.json").write_text(json.dumps({"a": 10**30, "b": [-(2**63), 1.5, None]}))
    assert read_json(tmp_path / "config.json") == {"a": 10**30, "b": [-(2**63), 1.5, None]}


def fails(path: str) -> None:
    with open(path, "w") as file:
        file.write("half")
    raise OSError(28, "No space left on device")


def test_a_full_disk_loses_nothing_and_leaves_nothing(tmp_path):
    replace_files(tmp_path, {"a": text_writer("old a"), "b": json_writer({"old": 1})})
    for written in ({"a": fails, "b": json_writer({})}, {"a": text_writer("new"), "b": fails}):
        with pytest.raises(CheckpointError, match=r"cannot write a, b to .*No space left.*Nothing .* is lost"):
            replace_files(tmp_path, written)
        assert sorted(os.listdir(tmp_path)) == ["a", "b"]
        assert ((tmp_path / "a").read_text(), read_json(tmp_path / "b")) == ("old a", {"old": 1})


def test_what_cannot_be_replaced_stays(tmp_path, monkeypatch):
    replace_files(tmp_path, {"a": text_writer("old"), "b": json_writer({"old": 1})})

    def refuse(source, destination, replace=os.replace):
        if os.fspath(destination).endswith("/a"):
            raise PermissionError(13, "Permission denied")
        replace(source, destination)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CheckpointError, match=r"cannot replace a, b .*Permission denied; nothing is lost"):
        replace_files(tmp_path, {"a": text_writer("new"), "b": json_writer({"new": 1})})
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert read_json(tmp_path / "b") == {"old": 1}


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "head").write_text("mine")
    with pytest.raises(CheckpointError, match="cannot write"):
        replace_files(tmp_path / "head", {"a": text_writer("new")})
    assert (tmp_path / "head").read_text() == "mine"


def test_files_are_on_the_disk_before_they_take_their_names(tmp_path, monkeypatch):
    """And what was linked to is not written through: a cache of the Hub is full of links."""
    events = []

    def fsync(descriptor, fsync=os.fsync):
        events.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).split(".")[1])
        fsync(descriptor)

    def replace(source, destination, replace=os.replace):
        events.append("replace " + os.path.basename(destination))
        replace(source, destination)

    (tmp_path / "blob").write_text("blob")
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "a").symlink_to(tmp_path / "blob")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(files, "_flush_folder", lambda folder: events.append("sync folder"))
    replace_files(tmp_path / "head", {"a": text_writer("new"), "b": text_writer("new")})
    assert events == ["sync a", "sync b", "replace a", "replace b", "sync folder"]
    assert (tmp_path / "blob").read_text() == "blob"
    assert (tmp_path / "head" / "a").read_text() == "new"
