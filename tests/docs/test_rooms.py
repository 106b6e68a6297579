"""The picture of the rooms in `docs/architecture.md` is that of the code, and the script that draws it is right."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from .pages import REPOSITORY


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", REPOSITORY / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def graph(**imports):
    return {room: frozenset(found.split()) for room, found in imports.items()}


def test_the_pictures_are_those_of_the_code_and_fit_a_screen(generate):
    whole, engine = generate.read_whole(), generate.read_rooms(generate.PACKAGE)
    for picture, rooms in ((generate.WHOLE_PICTURE, whole), (generate.PICTURE, engine)):
        assert picture.read_text() == generate.draw(rooms), "a picture is stale: run `python docs/generate.py`"
        assert not any(room in generate._reachable(room, rooms.imports) for room in rooms.imports), "no circles"
    assert len(whole.imports) <= 12
    assert (len(engine.imports) <= 22, engine.num_arrows <= 97) == (True, True)


def test_rooms_are_packages_and_modules_and_every_kind_of_import_counts(generate, tmp_path):
    sources = {
        "__init__": "from .loop import run",
        "errors": "",
        "loop": "import core.tree\nfrom . import errors, cache\nfrom .cache.layers import Layer",
        "tree": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .cache import Layer",
        "cache/__init__": "from .layers import Layer",
        "cache/layers": "from ..errors import CacheError\n\n\nclass Layer:\n    pass\n\n\nfrom torch import nn",
    }
    for name, text in sources.items():
        path = tmp_path / "core" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    rooms = generate.read_rooms(tmp_path / "core")
    assert rooms.imports == graph(errors="", loop="tree errors cache", tree="cache", cache="errors")
    assert rooms.num_modules == {"errors": 1, "loop": 1, "tree": 1, "cache": 2}
    assert (rooms.num_top, rooms.num_arrows, rooms.largest) == (4, 5, ("cache/layers.py", 8))


def test_rooms_stand_above_what_they_import_and_those_of_a_circle_side_by_side(generate):
    imports = graph(cli="loop errors", loop="cache", cache="tree errors", tree="cache", errors="")
    assert generate.layers(imports) == [["cli"], ["loop"], ["cache", "tree"], ["errors"]]


def test_arrows_that_others_stand_for_are_faint(generate):
    imports = graph(cli="loop errors", loop="errors", errors="")
    assert generate.direct(imports) == {("cli", "loop"), ("loop", "errors")}
    assert generate.direct(graph(a="b", b="a")) == {("a", "b"), ("b", "a")}


def test_every_room_and_every_arrow_is_drawn(generate):
    imports = graph(cli="loop errors", loop="errors", errors="")
    picture = generate.draw(generate.Rooms(imports, dict.fromkeys(imports, 1), 4, ("loop.py", 10)))
    assert all(f">{room}</text>" in picture for room in imports)
    assert picture.count("<path") == 1 + 3, "the tip, and the arrows"
    assert "3 rooms, 3 arrows; 4 modules at the top level; largest module: loop.py, 10 lines" in picture
