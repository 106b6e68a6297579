"""The data set class of the `speculators` package reads the hidden states that we write.

Its writer is a connector inside vLLM, which is not run here: what we read is laid out as its reader wants it.
"""

from __future__ import annotations

import subprocess

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from hf_speculate.drafting import RAW_LAST
from hf_speculate_training.data import DataOptions, prepare_data
from hf_speculate_training.states import ForeignFeatures, TargetReader, write_foreign_features

from ..support.models import build_tiny_model
from ..support.paths import TESTS
from ..support.speculators_peer import PYTHON
from ..support.training import build_byte_tokenizer


@pytest.mark.skipif(not PYTHON, reason="SPECULATORS_PYTHON names no interpreter (make scale)")
def test_speculators_reads_our_states_and_we_read_its_data(tmp_path):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 20, (6,), generator=generator).tolist()
    ids = [torch.randint(3, 96, (length,), generator=generator).tolist() for length in lengths]
    masks = [[0, 0] + [1] * (length - 2) for length in lengths]
    data = Dataset.from_dict({"input_ids": ids, "loss_mask": masks, "seq_len": lengths}).with_format("torch")
    data.save_to_disk(tmp_path / "data")
    model = build_tiny_model()
    rows = prepare_data(str(tmp_path / "data"), build_byte_tokenizer(), DataOptions(max_length=64)).rows()
    folder = tmp_path / "data" / "hidden_states"
    write_foreign_features(folder, TargetReader(model, (0, 1)), rows)
    script, outputs = TESTS / "optional" / "read_features_with_speculators.py", tmp_path / "outputs.safetensors"
    run = subprocess.run(
        [str(PYTHON), str(script), str(tmp_path / "data"), str(outputs)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = load_file(outputs)
    reader = TargetReader(model, (0, 1, RAW_LAST))
    for number in range(6):
        tokens = torch.tensor(ids[number])
        features = reader({"input_ids": tokens[None], "position_ids": torch.arange(len(tokens))[None]}).features
        assert torch.equal(found[f"{number}.input_ids"], tokens)
        torch.testing.assert_close(found[f"{number}.hidden_states"], torch.cat([features[0], features[1]], dim=-1)[0])
        torch.testing.assert_close(found[f"{number}.verifier_last_hidden_states"], features[RAW_LAST][0])
    assert len(ForeignFeatures(folder, TargetReader(model, (1,)), rows)) == len(rows)
