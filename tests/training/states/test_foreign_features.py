"""States in vLLM's files: found by tokens, told by comparing, equal to those of the target."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from hf_speculate.drafting import RAW_LAST
from hf_speculate_training import read_recipe, train_head
from hf_speculate_training.data import Collator, RowDataset
from hf_speculate_training.run import prepare
from hf_speculate_training.states import (
    FeatureCacheError,
    ForeignFeatures,
    TargetReader,
    is_foreign,
    write_foreign_features,
)

from ...support.training import recipe_file


LAYERS = (1, 3)


def build_model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def model():
    return build_model()


@pytest.fixture
def rows():
    """A dozen documents in fewer rows."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 20, (12,), generator=generator).tolist()
    ids = [torch.randint(3, 96, (length,), generator=generator).tolist() for length in lengths]
    masks = [[i > 1 for i in range(length)] for length in lengths]
    return RowDataset(Dataset.from_dict({"input_ids": ids, "loss_mask": masks, "length": lengths}), 24)


@pytest.fixture
def folder(model, rows, tmp_path):
    """Files of three hidden states and the last one, in another order than the rows; in bf16, as vLLM serves."""
    reader = TargetReader(model, (1, 2, 3))
    assert write_foreign_features(tmp_path / "mine", reader, rows) == 12
    path = tmp_path / "theirs"
    path.mkdir()
    for number in range(12):
        tensors = load_file(tmp_path / "mine" / f"hs_{number}.safetensors")
        tensors["hidden_states"] = tensors["hidden_states"].bfloat16()
        save_file(tensors, path / f"hs_{(number * 5 + 3) % 12}.safetensors")
    return path


def batches(dataset):
    return list(DataLoader(dataset, batch_size=3, collate_fn=Collator(pad_token_id=0)))


@pytest.mark.parametrize("layers", [(1, 3), (2,), (1, 2, 3, RAW_LAST), (1, 4)])
def test_states_are_those_of_the_target(model, rows, folder, layers):
    """The last one is taken through the target's final norm; 4 is what comes behind it."""
    assert is_foreign(folder)
    reader = TargetReader(model, layers)
    read = pickle.loads(pickle.dumps(ForeignFeatures(folder, reader, rows)))  # as workers of a loader have it
    for online, cached in zip(batches(rows), batches(read), strict=True):
        real = online["document_ids"] >= 0
        fresh, kept = reader(online), reader(cached)
        assert kept.last_hidden is cached["last_hidden"]
        scale = fresh.last_hidden.abs().max()
        torch.testing.assert_close(kept.last_hidden[real], fresh.last_hidden[real], rtol=0, atol=0.02 * float(scale))
        assert set(kept.features) == set(layers)
        for layer in layers:
            atol = 0.02 * float(fresh.features[layer].abs().max())
            torch.testing.assert_close(kept.features[layer][real], fresh.features[layer][real], rtol=0, atol=atol)


def test_files_of_states_behind_the_norm(model, rows, folder):
    """Their last column may be it: it is told by comparing, and not normed again."""
    reader = TargetReader(model, (1, 4))
    for path in folder.iterdir():
        tensors = load_file(path)
        ids = tensors["token_ids"]
        with torch.no_grad():
            normed = model(ids[None], output_hidden_states=True).hidden_states[-1][0]
        save_file({**tensors, "hidden_states": torch.stack([tensors["hidden_states"][:, 0], normed], dim=1)}, path)
    read = ForeignFeatures(folder, reader, rows)
    online, cached = batches(rows)[0], batches(read)[0]
    real = online["document_ids"] >= 0
    torch.testing.assert_close(cached["last_hidden"][real], reader(online).last_hidden[real], rtol=1e-4, atol=1e-4)


def test_states_that_are_not_there(model, rows, folder):
    with pytest.raises(FeatureCacheError, match=r"hidden states the last one before the norm, 1, 2, 3; what"):
        ForeignFeatures(folder, TargetReader(model, (0, 1)), rows)
    with pytest.raises(FeatureCacheError, match=r"state 0 of the files is none of the target's; .*% off"):
        ForeignFeatures(folder, TargetReader(build_model(seed=5), LAYERS), rows)


def test_documents_that_are_not_there(model, rows, folder):
    (folder / "hs_3.safetensors").unlink()
    with pytest.raises(FeatureCacheError, match=r"holds no states of 1 of 12 documents \(the first: number 0"):
        ForeignFeatures(folder, TargetReader(model, LAYERS), rows)


def test_a_truncated_file(model, rows, folder):
    path = folder / "hs_7.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FeatureCacheError, match=r"hs_7.safetensors cannot be read"):
        ForeignFeatures(folder, TargetReader(model, LAYERS), rows)


def test_writing_goes_on(model, rows, tmp_path):
    reader = TargetReader(model, LAYERS)
    write_foreign_features(tmp_path, reader, rows)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = tmp_path / "hs_4.safetensors"
    (tmp_path / "hs_5.safetensors").unlink()
    written = kept.stat().st_mtime_ns
    write_foreign_features(tmp_path, reader, rows)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert kept.stat().st_mtime_ns == written


def test_a_file_of_another_document_stays(model, rows, tmp_path):
    other = Dataset.from_dict({"input_ids": [[7, 8, 9]], "loss_mask": [[0, 1, 1]], "length": [3]})
    write_foreign_features(tmp_path, TargetReader(model, LAYERS), rows)
    with pytest.raises(FeatureCacheError, match=r"hs_0.safetensors is of another document"):
        write_foreign_features(tmp_path, TargetReader(model, LAYERS), RowDataset(other, 24))


def test_a_run_on_them_has_the_losses_of_one_online(recipe_values, tmp_path):
    """Float32 files, batches of their own: equal up to rounding."""
    recipe_values["method"]["options"]["noise"] = 0.0
    online = read_recipe(recipe_file(recipe_values, tmp_path), [f"output.folder={tmp_path / 'online'}"])
    train_head(online)
    cached = read_recipe(
        recipe_file(recipe_values, tmp_path),
        ["features.source=cache", f"features.folder={tmp_path / 'hs'}", f"output.folder={tmp_path / 'cached'}"],
    )
    run = prepare(cached, write=False)
    reader = TargetReader(run.target, run.method.feature_layers)
    write_foreign_features(cached.feature_folder, reader, run.train_rows())
    before = sorted(path.name for path in (tmp_path / "hs").iterdir())
    train_head(cached)
    assert sorted(path.name for path in (tmp_path / "hs").iterdir()) == before, "nothing of ours is written there"
    losses = [losses_of(tmp_path / name) for name in ("online", "cached")]
    assert losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def losses_of(folder) -> list[float]:
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return [
        entry["loss"]
        for entry in json.loads((last / "trainer_state.json").read_text())["log_history"]
        if "loss" in entry
    ]
