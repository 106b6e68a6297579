"""Files beside heads, stores and caches: read within bounds, written whole or not at all, and broken in any way."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset

from hf_speculate.drafting import CalibrationTable
from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import check_kinds, check_regular, json_writer, read_json, replace_files, replacing, text_writer
from hf_speculate_plugins.checkpoints import write_checkpoint
from hf_speculate_plugins.origin import check_origin, describe_identity
from hf_speculate_plugins.suffix import SuffixStore
from hf_speculate_tools.commands.reporting import save_line
from hf_speculate_tools.hub import recorded_card, write_card, write_custom_generate
from hf_speculate_training.data import RowDataset
from hf_speculate_training.run import Recipe, read_recipe, recipe_from, training_arguments
from hf_speculate_training.run.plots import plot_run
from hf_speculate_training.run.provenance import write_provenance, write_recipe
from hf_speculate_training.states import FeatureCache, TargetReader, write_features

from .support.models import VOCAB_SIZE, build_tiny_model
from .support.tiny_heads import HIDDEN, write_eagle_head


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
def test_read_json_refuses_invalid_and_oversized_files(content, message, tmp_path):
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


def test_read_json_refuses_lone_surrogates(tmp_path):
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


def test_reading_refuses_files_that_are_not_regular(tmp_path):
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


def test_files_are_as_readable_as_the_users_other_files(tmp_path):
    """Also where a library makes private ones, as safetensors does."""

    def private(path: str) -> None:
        os.close(os.open(path, os.O_CREAT, 0o600))

    (tmp_path / "other").touch()
    replace_files(tmp_path, {"a": private, "b": json_writer({})})
    assert {(tmp_path / name).stat().st_mode for name in ("a", "b")} == {(tmp_path / "other").stat().st_mode}


def test_replace_files_keeps_old_files_after_an_error(tmp_path, monkeypatch):
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


def test_files_are_on_the_disk_before_they_take_their_names(tmp_path, monkeypatch):
    """And what was linked to is not written through: a cache of the Hub is full of links."""
    events = []

    def fsync(descriptor, fsync=os.fsync):
        events.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def replace(source, destination, replace=os.replace):
        events.append("replace " + os.path.basename(destination))
        replace(source, destination)

    (tmp_path / "blob").write_text("blob")
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "a").symlink_to(tmp_path / "blob")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr("hf_speculate.files.writing._flush_folder", lambda folder: events.append("sync folder"))
    replace_files(tmp_path / "head", {"a": text_writer("new"), "b": text_writer("new")})
    assert events == ["sync a", "sync b", "replace a", "replace b", "sync folder"]
    assert (tmp_path / "blob").read_text() == "blob"
    assert (tmp_path / "head" / "a").read_text() == "new"


def tree(folder: Path) -> dict[str, str]:
    """Content of all files by name, those of scratch folders included."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


OLD = {"a": "old a", "b": "old b", "last": "old", "stale": "old", "other": "kept"}
NEW = {"a": "new a", "b": "old b", "inner/c": "new c", "last": "old"}


def write_over(folder: Path, content: dict[str, str]) -> None:
    with replacing(folder, "last") as new:
        for name, text in content.items():
            (new.scratch / name).parent.mkdir(exist_ok=True)
            (new.scratch / name).write_text(text)
        new.stale.extend(["stale", "absent", "a"])


def test_new_files_replace_old_ones_and_stale_ones_go(tmp_path):
    write_over(tmp_path / "made", OLD)
    assert tree(tmp_path / "made") == OLD
    write_over(tmp_path / "made", NEW)
    assert tree(tmp_path / "made") == NEW | {"other": "kept"}


@pytest.mark.parametrize("has_links", [True, False])
def test_an_interruption_at_any_step_puts_everything_back(tmp_path, monkeypatch, has_links):
    """Or comes too late: all files are new then. A disk may have no hard links."""

    def interrupt_at(step: int) -> None:
        left = [step]

        def counted(function):
            def call(*args, **kwargs):
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
                if function.__name__ == "link" and not has_links:
                    raise PermissionError(1, "Operation not permitted")
                return function(*args, **kwargs)

            return call

        for name in ("replace", "link", "fsync", "mkdir"):
            monkeypatch.setattr(os, name, counted(getattr(os, name)))

    seen = []
    for step in range(1, 60):
        folder = tmp_path / str(step)
        write_over(folder, OLD)
        interrupt_at(step)
        try:
            write_over(folder, NEW)
        except KeyboardInterrupt:
            seen.append(tree(folder))
        else:
            break
        finally:
            monkeypatch.undo()
    new = tree(folder)
    assert new == NEW | {"other": "kept"}
    num_old = seen.count(OLD)
    assert num_old > 15
    assert seen == [OLD] * num_old + [new] * (len(seen) - num_old)


def test_replace_files_refuses_to_replace_a_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "inner").write_text("kept")
    with pytest.raises(CheckpointError, match=r"cannot replace a, b in .*a is a folder; nothing is lost"):
        replace_files(tmp_path, {"a": text_writer("new"), "b": text_writer("new")})
    assert tree(tmp_path) == {"a/inner": "kept"}


def test_replace_files_names_files_that_cannot_be_restored(tmp_path, monkeypatch):
    replace_files(tmp_path, {"a": text_writer("old a"), "b": text_writer("old")})

    def refuse(source, destination, replace=os.replace):
        if ".old" not in os.fspath(destination) and os.fspath(destination).endswith("b"):
            raise PermissionError(13, "Permission denied")
        replace(source, destination)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CheckpointError, match=r"cannot put b back into .*; the old files are in (.*)\.$") as caught:
        replace_files(tmp_path, {"a": text_writer("new a"), "b": text_writer("new")})
    kept = Path(str(caught.value).rpartition(" are in ")[2].removesuffix("."))
    assert (kept / "b").read_text() == "old"


def card(folder: Path, number: int) -> bool:
    return write_card(folder, base_model="owner/target", algorithm="eagle", layout="specforge", notes=f"Run {number}.")


def store(folder: Path, number: int) -> None:
    requests = SuffixStore()
    requests.extend(*requests.begin("", [[1]]), [number])
    requests.save(folder / "store.json")


def recipe_of(number: int, target: str = "/local/target") -> Recipe:
    parts = {"target": {"path": target}, "data": {"train": "data.jsonl"}, "method": {"name": "medusa"}}
    return recipe_from({**parts, "training": {"max_steps": number}, "output": {"folder": "out"}})


WRITERS: dict[str, Callable[[Path, int], Any]] = {
    "calibration": lambda folder, number: CalibrationTable(greedy=(number / 10,) * 16).save(folder),
    "card": card,
    "code": lambda folder, number: write_custom_generate(folder),
    "store": store,
    "checkpoint": lambda folder, number: write_checkpoint(
        folder, "model.safetensors", {"a": torch.full((2,), number, dtype=torch.float32)}, {"number": number}
    ),
    "pickle": lambda folder, number: write_checkpoint(
        folder, "pytorch_model.bin", {"a": torch.full((2,), number, dtype=torch.float32)}, {"number": number}
    ),
    "provenance": lambda folder, number: write_provenance(folder, {"status": f"run {number}"}),
    "recipe": lambda folder, number: write_recipe(folder, recipe_of(number)),
    "curves": lambda folder, number: plot_run([{"step": 1, "loss": number}, {"step": 2, "loss": 1}], folder / "a.png"),
    "figures": lambda folder, number: save_line(str(number), folder / "out.json"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_what_a_writer_wrote_before(writer, tmp_path, monkeypatch):
    """Every file of ours in a user's folder is replaced whole."""

    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    WRITERS[writer](tmp_path, 1)
    before = content()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(SpeculateError, match=r"cannot write .*No space left on device"):
            WRITERS[writer](tmp_path, 2)
    assert content() == before
    WRITERS[writer](tmp_path, 2)
    assert (content() != before) == (writer != "code")


def test_a_line_goes_to_a_device_as_it_is(tmp_path):
    (tmp_path / "link").symlink_to(os.devnull)
    save_line("{}", tmp_path / "link")
    assert not os.path.isfile(os.devnull)
    (tmp_path / "file").write_text("old")
    (tmp_path / "other").symlink_to("file")
    save_line("{}", tmp_path / "other")
    assert (tmp_path / "other").is_symlink()
    assert (tmp_path / "file").read_text() == "{}\n"


def test_a_recipe_without_paths_needs_no_copy_of_this_machine(tmp_path):
    write_recipe(tmp_path, recipe_of(1))
    assert sorted(os.listdir(tmp_path)) == ["recipe.local.yaml", "recipe.yaml"]
    write_recipe(tmp_path, recipe_of(1, "owner/target"))
    assert os.listdir(tmp_path) == ["recipe.yaml"]


VALUES: tuple[Any, ...] = (
    *(None, [], {}, [[1]], {"a": [1]}, "", "x", "../../etc/passwd", "a\0b", "\ud800", "\x1b[2J", "x" * 5000),
    *(True, -1, 0, 7, 10**30, 10**60, 0.5, -1.0, 1e308, float("nan"), float("inf")),
)
BYTES = (b"[" * 5000, b"{", b"}", b"\0" * 9, b"\xff", b"NaN", b"1e999", b"9" * 5000, b'"', b"\\ud800", b",", b"\n")
LINES = (
    "a: &a [*a]",
    "training: &t {x: *t}",
    "x: !!python/object/apply:os.system [ls]",
    "x: " + "[" * 500,
    "training: {max_steps: 190:20:30, learning_rate: .nan}",
    "training: {max_steps: 1e308}",
    "training: {run_name: 2020-13-45, seed: !!binary aGk=}",
    "? [a]\n: 1",
    "5: 6",
    'output: {folder: "a\\0b"}',
    "training: !!set {a, b}",
    "data: {<<: [1]}",
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside."""
    keys = list(value) if isinstance(value, dict) else range(min(len(value), 4)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(*path, key), *places(value[key], (*path, key))]]


def changed(content: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A copy with one to three values replaced, removed, or under another name."""
    content = copy.deepcopy(content)
    for _ in range(chance.randint(1, 3)):
        *path, last = chance.choice(places(content) or [("x",)])
        inner: Any = content
        for key in path:
            inner = inner[key]
        if chance.random() < 0.7:
            inner[last] = copy.deepcopy(chance.choice(VALUES))
        elif isinstance(inner, dict):
            value = inner.pop(last, 1)
            if chance.random() < 0.5:
                inner[chance.choice(["../../x.safetensors", "x", "features-00009.safetensors"])] = value
    return content


def torn(data: bytes, chance: random.Random) -> bytes:
    """The bytes cut off, or with something else in between."""
    place = chance.randrange(len(data))
    kind = chance.random()
    if kind < 0.3:
        return data[:place]
    if kind < 0.4:
        return data.decode("utf-8").encode("utf-16")
    return data[:place] + chance.choice(BYTES) + data[place + chance.choice((0, 1, 5)) :]


def broken(content: dict[str, Any], chance: random.Random) -> bytes:
    """A JSON file that is not as it was."""
    if chance.random() < 0.7:
        return json.dumps(changed(content, chance)).encode()
    return torn(json.dumps(content).encode(), chance)


def broken_yaml(content: dict[str, Any], chance: random.Random) -> bytes:
    kind = chance.random()
    if kind < 0.4:
        return yaml.safe_dump(changed(content, chance)).encode("utf-8", "surrogatepass")
    text = yaml.safe_dump(content)
    return torn(text.encode(), chance) if kind < 0.7 else f"{text}{chance.choice(LINES)}\n".encode()


@dataclass(frozen=True)
class Case:
    """A file, its content when it is whole, and who reads it."""

    path: Path
    content: dict[str, Any]
    read: Callable[[], Any]

    def outcome(self, chance: random.Random) -> str:
        """ "" where the broken file is read or refused by an error of ours."""
        data = (broken_yaml if self.path.suffix == ".yaml" else broken)(self.content, chance)
        self.path.write_bytes(data)
        try:
            self.read()
        except SpeculateError:
            return ""
        except Exception as error:
            return f"{self.path.name} {data[:300]!r}: {type(error).__name__}: {error}"
        return ""


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> list[Case]:
    root, model = tmp_path_factory.mktemp("side"), build_tiny_model()
    head, cache = root / "head", root / "cache"
    write_eagle_head(head, HIDDEN, VOCAB_SIZE)
    recipe = {
        "target": {"path": "owner/target", "device_map": {"": 0}},
        "data": {"train": "data.jsonl", "max_length": 64, "columns": {"prompt": "question"}},
        "method": {"name": "medusa", "head": {"num_heads": 2}},
        "training": {"learning_rate": 1e-4, "max_steps": 3, "use_cpu": True, "run_name": "a"},
        "output": {"folder": "out", "notes": "some"},
    }
    provenance = {
        "identity": describe_identity(model),
        "adapters": {"lora": "0123"},
        "target": {"name": "owner/target", "adapters": None},
        "recipe": {**recipe, "data": {"train": "a.jsonl", "eval": "b.jsonl"}},
        "metrics": {"eval_mean_acceptance_length": 2.5, "eval_acceptance_rate_by_depth": [0.5, 0.25]},
        "evaluation_prompts": 4,
        "status": "complete",
    }
    CalibrationTable(greedy=(0.5,) * 16).save(head)
    store = SuffixStore()
    store.attach(10)
    store.extend(*store.begin("", [[1]]), [1, 2, 3])
    store.save(root / "store.json")
    ids = [[3, 4, 5]] * 5
    documents = {"input_ids": ids, "loss_mask": [[False, True, True]] * 5, "length": [3] * 5}
    rows, reader = RowDataset(Dataset.from_dict(documents), 3), TargetReader(model, (1,))
    write_features(cache, reader, rows, rows_per_shard=2)
    index = json.loads((cache / "cache.json").read_text())

    return [
        Case(head / "provenance.json", provenance, lambda: (check_origin(str(head), model), recorded_card(head))),
        Case(head / "calibration.json", json.loads((head / "calibration.json").read_text()), lambda: load_table(head)),
        Case(root / "store.json", json.loads((root / "store.json").read_text()), lambda: load_store(root)),
        Case(cache / "cache.json", index, lambda: list(FeatureCache(cache))),
        Case(root / "recipe.yaml", recipe, lambda: training_arguments(read_recipe(root / "recipe.yaml"))),
    ]


def load_table(folder: Path) -> None:
    for samples in (False, True):
        assert all(0 <= share <= 1 for share in CalibrationTable.load(folder).start(samples).shares)


def load_store(folder: Path) -> None:
    SuffixStore.load(folder / "store.json").attach(10)


@pytest.mark.parametrize("count", [240, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_broken_file_is_a_raw_error(cases, count):
    for case in cases:  # whole, each of them is read
        case.path.write_text(yaml.safe_dump(case.content) if case.path.suffix == ".yaml" else json.dumps(case.content))
        case.read()
    raw = [found for number in range(count) if (found := cases[number % len(cases)].outcome(random.Random(number)))]
    assert not raw, f"{len(raw)} of {count} raw errors:\n" + "\n".join(raw[:20])
