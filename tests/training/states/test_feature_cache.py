"""States from disk equal states from the target; an interrupted, damaged or foreign cache is told apart."""

from __future__ import annotations

import copy
import json
import pickle
import re

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save
from torch.utils.data import DataLoader

from hf_speculate.drafting import RAW_LAST
from hf_speculate_training.data import Collator, RowDataset
from hf_speculate_training.states import (
    FeatureCache,
    FeatureCacheError,
    TargetReader,
    cache_key,
    feature_bytes,
    write_features,
)


LAYERS = (1, 2, RAW_LAST)  # 2 comes after the final norm: `last_hidden`
OPTIONS = {"batch_size": 2, "rows_per_shard": 4}


def make_rows(seed: int = 0, max_length: int = 24) -> RowDataset:
    """10 rows or so, packed."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 20, (26,), generator=generator).tolist()
    ids = [torch.randint(3, 96, (length,), generator=generator).tolist() for length in lengths]
    masks = [[i > 1 for i in range(length)] for length in lengths]
    return RowDataset(Dataset.from_dict({"input_ids": ids, "loss_mask": masks, "length": lengths}), max_length)


@pytest.fixture
def rows():
    return make_rows()


@pytest.fixture
def reader(tiny_model):
    return TargetReader(tiny_model(), LAYERS)


def batches(dataset, size: int):
    return list(DataLoader(dataset, batch_size=size, collate_fn=Collator(pad_token_id=0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_batches_equal_online_ones(tiny_model, rows, tmp_path, dtype):
    """Bit by bit, in the target's dtype and the same batches."""
    reader = TargetReader(tiny_model(dtype=dtype), LAYERS)
    cache = write_features(tmp_path, reader, rows, **OPTIONS)
    assert len(cache) == len(rows)
    for online, cached in zip(batches(rows, 2), batches(cache, 2), strict=True):
        for name in online:
            assert torch.equal(online[name], cached[name]), name
        fresh, kept = reader(online), reader(cached)
        real = online["document_ids"] >= 0
        assert kept.last_hidden is cached["last_hidden"], "no forward of the target"
        assert torch.equal(fresh.last_hidden[real], kept.last_hidden[real])
        assert kept.last_hidden.dtype == dtype
        assert set(kept.features) == set(LAYERS)
        for layer in LAYERS:
            assert torch.equal(fresh.features[layer][real], kept.features[layer][real]), layer


def test_write_features_announces_its_size(reader, rows, tmp_path, caplog):
    write_features(tmp_path, reader, rows, **OPTIONS)
    tokens = sum(rows.lengths)
    # Hidden states 1, RAW_LAST and the last one; three int64 and a bool a token.
    expected = tokens * (3 * 32 * 4 + 3 * 8 + 1)
    assert f"{len(rows)} rows: {expected / 2**30:.3f} GiB in {tmp_path}" in caplog.text
    assert feature_bytes(tmp_path / "absent", reader.target, LAYERS, rows) == expected
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    headers = 2048 * len(list(tmp_path.glob("*.safetensors")))
    assert expected <= written <= expected + headers


def test_write_features_resumes_after_an_interruption(reader, rows, tmp_path):
    """Stopped in a shard: the shards before stay as they are, and the rest is what it would have been."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    write_features(whole, reader, rows, **OPTIONS)
    calls = []

    def stopping(batch):
        calls.append(batch)
        if len(calls) == 3:  # shards are two batches
            raise KeyboardInterrupt
        return TargetReader.__call__(reader, batch)

    stopper = copy.copy(reader)
    stopper.__class__ = type("Stopper", (TargetReader,), {"__call__": lambda self, batch: stopping(batch)})
    with pytest.raises(KeyboardInterrupt):
        write_features(part, stopper, rows, **OPTIONS)
    with pytest.raises(FeatureCacheError, match=r"unfinished: features-00001.safetensors is missing"):
        FeatureCache(part)
    first = (part / "features-00000.safetensors").stat().st_mtime_ns
    write_features(part, reader, rows, **OPTIONS)
    write_features(part, reader, rows, **OPTIONS)  # a finished cache is not written again
    assert (part / "features-00000.safetensors").stat().st_mtime_ns == first
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in part.iterdir()), "nothing half-written is left"
    for name in names:
        assert (part / name).read_bytes() == (whole / name).read_bytes(), name


def test_other_target_data_or_layers_are_refused(reader, rows, tmp_path, tiny_model):
    write_features(tmp_path, reader, rows, **OPTIONS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    changed = copy.deepcopy(tiny_model())
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    asked = {
        "target": (TargetReader(changed, LAYERS), rows),
        "data": (reader, make_rows(seed=1)),
        "layers": (TargetReader(tiny_model(), (1, 2)), rows),
    }
    for name, (other_reader, other_rows) in asked.items():
        keys = cache_key(reader, rows), cache_key(other_reader, other_rows)
        found, wanted = (re.escape(repr(getattr(key, name))) for key in keys)
        with pytest.raises(FeatureCacheError, match=f"other states than .*: it has {name} {found}, not {wanted}[.;]"):
            write_features(tmp_path, other_reader, other_rows, **OPTIONS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_feature_cache_refuses_other_folders(tmp_path):
    with pytest.raises(FeatureCacheError, match=r"does not hold a feature cache: cannot read .*cache\.json"):
        FeatureCache(tmp_path)
    (tmp_path / "cache.json").write_text("{}")
    with pytest.raises(FeatureCacheError, match="target: field required"):
        FeatureCache(tmp_path)


def test_workers_open_files_of_their_own(reader, rows, tmp_path):
    cache = write_features(tmp_path, reader, rows, **OPTIONS)
    expected = cache[0]["last_hidden"]
    copied = pickle.loads(pickle.dumps(cache))
    assert not copied._files
    assert torch.equal(copied[0]["last_hidden"], expected)
    assert torch.equal(cache[-1]["input_ids"], cache[len(cache) - 1]["input_ids"])
    with pytest.raises(IndexError):
        cache[len(cache)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows_per_shard": 0}, "rows_per_shard: input should be greater than 0"),
        ({"num_rows": 10**12, "rows_per_shard": 4}, "features-00002.safetensors does not hold 4 rows"),
    ],
    ids=range(2),
)
def test_feature_cache_refuses_an_impossible_index(reader, rows, tmp_path, change, message):
    write_features(tmp_path, reader, rows, **OPTIONS)
    index = json.loads((tmp_path / "cache.json").read_text())
    (tmp_path / "cache.json").write_text(json.dumps(index | change))
    with pytest.raises(FeatureCacheError, match=message):
        FeatureCache(tmp_path)
    with pytest.raises(FeatureCacheError, match=message if "input" in message else "num_rows 1000000000000, not"):
        write_features(tmp_path, reader, rows, **OPTIONS)


@pytest.mark.parametrize("content", ["empty", "truncated", "no offsets", "short", "fewer rows"])
def test_feature_cache_refuses_a_damaged_shard(reader, rows, tmp_path, content):
    write_features(tmp_path, reader, rows, **OPTIONS)
    path = tmp_path / "features-00001.safetensors"
    tensors = load_file(path)
    if content == "no offsets":
        del tensors["offsets"]
    elif content == "short":
        tensors["last_hidden"] = tensors["last_hidden"][1:]
    elif content == "fewer rows":
        tensors["offsets"] = tensors["offsets"][1:]
    path.write_bytes({"empty": b"", "truncated": save(tensors)[:-1]}.get(content, save(tensors)))
    with pytest.raises(FeatureCacheError, match=r"features-00001.* Remove it"):
        write_features(tmp_path, reader, rows, **OPTIONS)
    path.unlink()
    assert len(write_features(tmp_path, reader, rows, **OPTIONS)) == len(rows)
