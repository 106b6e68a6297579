"""Parts of a target that a conversion reads from its files: what is missing is named with its folder."""

from __future__ import annotations

import pytest

from hf_speculate.errors import CheckpointError, DrafterNotFoundError
from hf_speculate_plugins.checkpoints import TargetFiles, read_weight_map


def test_a_missing_shard_is_named_with_its_index(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path, max_shard_size="20KB")
    for shard in tmp_path.glob("model-*.safetensors"):
        shard.unlink()
    index = tmp_path / "model.safetensors.index.json"
    with pytest.raises(CheckpointError, match=rf"{index} names the file 'model-0000\d-of-\S+', which is not there"):
        TargetFiles(tmp_path).input_embeddings()


def test_a_relative_path_is_named_with_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(DrafterNotFoundError, match=f"'runs/target' is not a folder here: .* {tmp_path}/runs/target"):
        TargetFiles("runs/target")
    with pytest.raises(CheckpointError, match=f"neither model.safetensors nor its index is there in {tmp_path}/runs"):
        read_weight_map(lambda name: None, "runs")
