"""Files beside heads, stores and caches, broken in any way: a clear error or none. Cases are the same every time."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset

from hf_speculate.drafting import CalibrationTable
from hf_speculate.errors import SpeculateError
from hf_speculate.hub import check_origin, describe_identity, recorded_card
from hf_speculate_plugins.suffix import SuffixStore
from hf_speculate_plugins.suffix.store import IndexKind
from hf_speculate_training.data import RowDataset
from hf_speculate_training.run import read_recipe, training_arguments
from hf_speculate_training.states import FeatureCache, TargetReader, cache_key, write_features
from hf_speculate_training.states.cache_index import CacheIndex

from .support.models import VOCAB_SIZE, build_tiny_model
from .support.tiny_heads import HIDDEN, write_eagle_head


VALUES: tuple[Any, ...] = (
    *(None, [], {}, [[1]], {"a": [1]}, "", "x", "../../etc/passwd", "a\0b", "\ud800", "\x1b[2J", "x" * 5000),
    *(True, -1, 0, 7, 10**30, 10**60, 0.5, -1.0, 1e308, float("nan"), float("inf")),
)
BYTES = (b"[" * 5000, b"{", b"}", b"\0" * 9, b"\xff", b"NaN", b"1e999", b"9" * 5000, b'"', b"\\ud800", b",", b"\n")
LINES = (
    "a: &a [*a]",
    "training: &t {x: *t}",
    "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
    + "\n".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)),
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
    """Of all values inside."""
    keys = list(value) if isinstance(value, dict) else range(min(len(value), 4)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(*path, key), *places(value[key], (*path, key))]]


def changed(content: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """With one to three values replaced, removed, or under another name."""
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
    """Cut, or with something else in between."""
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
    store.attach(IndexKind((1, 2), None), 10)
    store.extend(store.begin(""), [1, 2, 3])
    store.save(root / "store.json")
    ids = [[3, 4, 5]] * 5
    documents = {"input_ids": ids, "loss_mask": [[False, True, True]] * 5, "length": [3] * 5}
    rows, reader = RowDataset(Dataset.from_dict(documents), 3), TargetReader(model, (1,))
    write_features(cache, reader, rows, rows_per_shard=2, show_progress=False)
    index = json.loads((cache / "cache.json").read_text())

    def read_note() -> None:
        (cache / "cache.json").write_text(json.dumps(index))
        CacheIndex.open(cache, cache_key(reader, rows), len(rows), 2)

    return [
        Case(head / "provenance.json", provenance, lambda: (check_origin(str(head), model), recorded_card(head))),
        Case(head / "calibration.json", json.loads((head / "calibration.json").read_text()), lambda: load_table(head)),
        Case(root / "store.json", json.loads((root / "store.json").read_text()), lambda: load_store(root)),
        Case(cache / "cache.json", index, lambda: [FeatureCache(cache)[i] for i in range(5)]),
        Case(cache / "cache-1.json", index, read_note),
        Case(root / "recipe.yaml", recipe, lambda: training_arguments(read_recipe(root / "recipe.yaml"))),
    ]


def load_table(folder: Path) -> None:
    for samples in (False, True):
        assert all(0 <= share <= 1 for share in CalibrationTable.load(folder).start(samples).shares)


def load_store(folder: Path) -> None:
    SuffixStore.load(folder / "store.json").attach(IndexKind((1, 2), None), 10)


@pytest.mark.parametrize("count", [240, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_broken_file_is_a_raw_error(cases, count):
    for case in cases:  # whole, each of them is read
        case.path.write_text(yaml.safe_dump(case.content) if case.path.suffix == ".yaml" else json.dumps(case.content))
        case.read()
    raw = [found for number in range(count) if (found := cases[number % len(cases)].outcome(random.Random(number)))]
    assert not raw, f"{len(raw)} of {count} raw errors:\n" + "\n".join(raw[:20])
