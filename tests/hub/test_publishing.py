"""Only the files that a head's layout names leave a machine, without secrets. The rest of a folder stays."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from hf_speculate import AutoSpeculator
from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import own_file
from hf_speculate_tools.heads.convert import convert_checkpoint
from hf_speculate_tools.hub import public_provenance, push_folder
from hf_speculate_tools.hub.public import _RECIPE
from hf_speculate_tools.hub.publishing import ORIGINS, published_files
from hf_speculate_training.run.recipe import Recipe
from tests.support.heads import DEPTH, target, write_head
from tests.support.hub import FakeHub
from tests.support.paths import REPOSITORY


# Put together here, so that nobody's scanner takes this file for a leak.
TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz12345678"
PASSWORD, PRIVATE = "pa55w0rd", "WORDS-OF-NOBODY-ELSE"
FORBIDDEN = tuple(word.encode() for word in (TOKEN, PASSWORD, PRIVATE, "/home/alice"))

PRIVATE_NAMES = (
    *(".env", ".git-credentials", "id_rsa", "token", "secrets.json", "notes.json", "d2t.json", "recipe.local.yaml"),
    *("recipe.yaml~", "nohup.out", "train.log", "training_args.bin", "optimizer.pt", "rng_state.pth", "serve.sh"),
    *("tokenizer_config.json", "checkpoint-4/optimizer.pt", "runs/events"),
    *("custom_generate/generate.py", "custom_generate/.env", ".cache/x"),
)
URL = f"https://me:{PASSWORD}@host/x"
SECRETS = (("x", TOKEN), ("data", URL), (TOKEN, 1))
SECTIONS = ("notes", "recipe.training", "recipe.output", "recipe.data", "target", "identity", "metrics", "data.train")
WORDS = f"{PRIVATE} {PRIVATE}"
ODD_VALUES = (None, 1, "text", [], [["x"]], {}, {"a": {"b": WORDS}}, [[WORDS]], True, float("nan"))


@pytest.fixture(scope="module")
def plain_head(tmp_path_factory):
    """A tiny head with all that a run writes beside it."""
    folder = tmp_path_factory.mktemp("heads") / "head"
    write_head(folder, "safeailab", file="model.safetensors")
    for name in ("calibration.json", "curves.png", "provenance.json"):
        shutil.copy(REPOSITORY / "examples" / "pycoder-medusa" / name, folder)
    edit_json(folder / "provenance.json", lambda content: content.pop("identity"))  # of another target
    (folder / "recipe.yaml").write_text("target: {path: x}\n")
    return folder


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    content = {}
    if path.is_file() and not path.is_symlink():
        with suppress(ValueError):  # broken by what was planted before
            content = json.loads(path.read_text())
    change(content)
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(content))


def plant(folder: Path, outside: Path, choose: random.Random) -> None:
    """Puts one thing into a folder that must not leave it."""
    present = ("README.md", "config.json", "model.safetensors", *ORIGINS)

    def private_file() -> None:
        path = folder / choose.choice(PRIVATE_NAMES)
        if not path.parent.is_symlink() and not path.is_symlink():
            path.parent.mkdir(exist_ok=True)
            path.write_text(PRIVATE)

    def link() -> None:
        names = choose.choice([present, PRIVATE_NAMES, ("custom_generate",)])
        path = folder / choose.choice(names)
        if path.parent == folder or (path.parent.is_dir() and not path.parent.is_symlink()):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            path.symlink_to(
                choose.choice([outside / path.name, outside / path.name, outside, Path("..") / "outside/x"])
            )

    def pipe() -> None:
        path = folder / choose.choice([*present[3:6], "pipe.bin"])
        path.unlink(missing_ok=True)
        os.mkfifo(path)

    def secret_in_json() -> None:
        name = choose.choice(["config.json", "calibration.json"])
        key, value = choose.choice(SECRETS)
        if (folder / name).parent.is_dir() and not (folder / name).parent.is_symlink():
            edit_json(
                folder / name,
                lambda content: content.update({key: value} if choose.random() < 0.5 else {"o": {key: value}}),
            )

    def provenance() -> None:
        def change(content: dict) -> None:
            place = content
            for key in choose.choice(SECTIONS).split("."):
                place = place.setdefault(key, {}) if isinstance(place, dict) else {}
            if isinstance(place, dict):
                place[choose.choice(["hub_token", "mine"])] = choose.choice(
                    [f"{PRIVATE} {PRIVATE}", TOKEN, {"token": PASSWORD}]
                )
                place["command"] = ["train", TOKEN, "--data", URL]
            content["command"] = ["/home/alice/x", f"training.run_name={TOKEN}", URL]

        edit_json(folder / "provenance.json", change)

    def odd_provenance() -> None:
        def change(content: dict) -> None:
            place = content
            for _ in range(choose.randrange(1, 4)):
                key = choose.choice(list(place)) if place else "x"
                if not isinstance(place.get(key), dict) or choose.random() < 0.4:
                    place[key] = choose.choice(ODD_VALUES)
                    return
                place = place[key]

        edit_json(folder / "provenance.json", change)

    def words() -> None:
        name = choose.choice(["README.md", "recipe.yaml", "calibration.json"])
        text = choose.choice([f"# Mine\n\n{TOKEN} {URL}\n", f"a: {URL}\n", "{"])
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(text)

    choose.choice([private_file, private_file, link, link, pipe, secret_in_json, provenance, odd_provenance, words])()


def write_outside(outside: Path, plain_head: Path) -> None:
    """Files that could stand in the place of a head's."""
    outside.mkdir(exist_ok=True)
    for name in (*ORIGINS, "config.json"):
        (outside / name).parent.mkdir(exist_ok=True)
        (outside / name).write_text(json.dumps({"architectures": [WORDS]}))
    (outside / "README.md").write_text(WORDS)
    (outside / "curves.png").write_bytes((plain_head / "curves.png").read_bytes() + PRIVATE.encode())


def check_upload(plain_head: Path, place: Path, hub: FakeHub, caplog, seed: int) -> bool:
    """Pushes a folder with things planted in it; returns whether there was an upload."""
    choose, folder, outside = random.Random(seed), place / f"head-{seed}", place / "outside"
    shutil.copytree(plain_head, folder)
    write_outside(outside, plain_head)
    for _ in range(choose.randrange(1, 6)):
        plant(folder, outside, choose)
    repo = f"me/head-{seed}"
    said = ""
    try:
        push_folder(folder, repo)
    except SpeculateError as error:
        said = str(error)
    said += caplog.text
    caplog.clear()
    uploaded = [path for path in hub.folder(repo).rglob("*") if path.is_file()]
    for path in uploaded:
        assert not path.is_symlink()
        content = path.read_bytes() + str(path.relative_to(hub.root)).encode()
        assert not [word for word in FORBIDDEN if word in content], (seed, path)
    assert TOKEN not in said, seed
    assert PASSWORD not in said, seed
    names = {path.relative_to(hub.folder(repo)).as_posix() for path in uploaded}
    allowed = {"README.md", "config.json", "model.safetensors", "custom_generate/generate.py"}
    assert names <= allowed | {"custom_generate/requirements.txt", *ORIGINS}
    assert not names or names >= {"README.md", "config.json", "model.safetensors"}
    shutil.rmtree(folder)
    return bool(names)


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_push_folder_uploads_nothing_private_from_random_folders(plain_head, tmp_path, hub, caplog, count):
    sent = [check_upload(plain_head, tmp_path, hub, caplog, 1000 * count + number) for number in range(count)]
    assert sum(sent) > count / 3, "most folders still have a head that can leave"


def test_push_folder_uploads_every_file_of_a_clean_folder(plain_head, tmp_path, hub, caplog):
    push_folder(plain_head, "me/head")
    there = hub.folder("me/head")
    names = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert names == {"README.md", "config.json", "model.safetensors", *ORIGINS}
    for name in names - {"README.md", "provenance.json", "recipe.yaml"}:
        assert (there / name).read_bytes() == (plain_head / name).read_bytes(), name
    assert "eagle" not in caplog.text


@pytest.mark.parametrize("name", ["README.md", "config.json", "calibration.json"])
@pytest.mark.parametrize("secret", [TOKEN, URL, "Authorization: Bearer abcdefgh"])
def test_a_file_that_holds_a_secret_is_refused_by_name(plain_head, tmp_path, hub, name, secret):
    head = shutil.copytree(plain_head, tmp_path / "head")
    if name == "README.md":
        (head / name).write_text(f"# Mine\n\n{secret}")
    else:
        edit_json(head / name, lambda content: content.update(a=secret))
    with pytest.raises(CheckpointError, match=f"{name} holds what looks like a token"):
        push_folder(head, "me/head")
    assert hub.calls == []


def test_a_target_that_is_named_by_a_path_is_warned_of(plain_head, tmp_path, hub, caplog):
    head = shutil.copytree(plain_head, tmp_path / "head")
    edit_json(head / "config.json", lambda content: content.update(base_model_name_or_path="/home/alice/target"))
    push_folder(head, "me/head")
    assert "config.json names the target by a path, /home/alice/target: write its Hub id there." in caplog.text


@pytest.mark.parametrize("head", ["pycoder-eagle3", "pycoder-medusa", "pycoder-dspark", "smollm2-eagle3"])
def test_the_allowed_fields_are_those_that_runs_write(head):
    content = json.loads((REPOSITORY / "examples" / head / "provenance.json").read_text())
    content.pop("files", None)  # written by earlier versions
    content["recipe"]["data"].pop("streaming", None)
    content["recipe"]["method"].pop("adapter", None)
    assert public_provenance(content) == content


def test_the_allowed_fields_of_a_recipe_are_the_fields_of_a_recipe():
    """A field that the list lacks would be lost from every published recipe; one that no recipe has means nothing."""
    sections = {name: kind for name, kind in get_type_hints(Recipe).items() if is_dataclass(kind)}
    assert _RECIPE.keys() == {field.name for field in fields(Recipe)}
    for name, kind in sections.items():
        assert _RECIPE[name].keys() == {field.name for field in fields(kind)}, name


class TestLinks:
    def test_a_file_of_the_drafters_behind_a_link_is_refused_by_name(self, plain_head, tmp_path, hub):
        head = shutil.copytree(plain_head, tmp_path / "head")
        (head / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
        (head / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
        with pytest.raises(CheckpointError, match=r"model\.safetensors is a link to .*elsewhere"):
            push_folder(head, "me/head")
        assert hub.calls == []

    @pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "."])
    def test_own_file_refuses_names_outside_the_folder(self, tmp_path, name):
        with pytest.raises(CheckpointError, match="is not the name of a file"):
            own_file(tmp_path, name)

    def test_a_folder_that_is_reached_by_a_link(self, plain_head, tmp_path):
        (tmp_path / "latest").symlink_to(plain_head)
        assert published_files(tmp_path / "latest") == published_files(plain_head)

    def test_convert_copies_nothing_from_behind_a_link(self, plain_head, tmp_path):
        head = shutil.copytree(plain_head, tmp_path / "head")
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "notes.json").write_text(json.dumps({"x": PRIVATE}))
        (head / "curves.png").unlink()
        for name in ("curves.png", "README.md"):
            (head / name).symlink_to(tmp_path / "outside" / "notes.json")
        target().save_pretrained(tmp_path / "target")
        convert_checkpoint(head, tmp_path / "new", "speculators", tmp_path / "target")
        assert not (tmp_path / "new" / "curves.png").exists()
        for path in (tmp_path / "new").rglob("*"):
            assert not path.is_file() or PRIVATE.encode() not in path.read_bytes(), path


class TestSnapshots:
    """A snapshot in the Hub's cache consists of links into the blobs of its repository."""

    @pytest.fixture
    def snapshot(self, plain_head, tmp_path):
        root = tmp_path / "models--me--head"
        folder = root / "snapshots" / ("0123456789" * 4)
        for number, path in enumerate(path for path in plain_head.rglob("*") if path.is_file()):
            blob, link = root / "blobs" / f"{number:040x}", folder / path.relative_to(plain_head)
            blob.parent.mkdir(parents=True, exist_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, blob)
            link.symlink_to(os.path.relpath(blob, link.parent))
        return folder

    def test_snapshot_is_converted_and_pushed_as_regular_files(self, snapshot, tmp_path, hub):
        model = target()
        assert model.config.num_hidden_layers == DEPTH
        AutoSpeculator.from_pretrained(snapshot, target=model)
        model.save_pretrained(tmp_path / "target")
        convert_checkpoint(snapshot, tmp_path / "new", "speculators", tmp_path / "target")
        push_folder(snapshot, "me/again")
        for folder in (tmp_path / "new", hub.folder("me/again")):
            assert {"provenance.json", "recipe.yaml", "curves.png"} <= set(os.listdir(folder))
            assert not any(path.is_symlink() for path in folder.rglob("*"))
        weights = hub.folder("me/again") / "model.safetensors"
        assert weights.read_bytes() == (snapshot / "model.safetensors").read_bytes()

    def test_push_folder_refuses_links_that_leave_a_snapshot(self, snapshot, tmp_path, hub):
        for other in (tmp_path / "x", tmp_path / "models--you--head" / "blobs" / "0"):
            other.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(snapshot / "model.safetensors", other)
            (snapshot / "model.safetensors").unlink()
            (snapshot / "model.safetensors").symlink_to(other)
            with pytest.raises(CheckpointError, match="is a link to"):
                push_folder(snapshot, "me/again")
