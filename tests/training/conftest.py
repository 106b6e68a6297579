"""A target with a byte-level tokenizer, its own texts as data, recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.training import BYTE_VOCAB_SIZE, PAD, build_byte_tokenizer, save_target


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return build_byte_tokenizer()


@pytest.fixture
def write_lines(tmp_path):
    """Writes records to a JSON-lines file of the test's folder and returns its path."""

    def write(records, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


@pytest.fixture(autouse=True)
def _own_datasets_cache(tmp_path, monkeypatch):
    """Keeps the files of `datasets` in the test's folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture(scope="session")
def saved_target(tmp_path_factory) -> Path:
    """Folder of a tiny random Llama with the byte tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    save_target(folder)
    return folder


@pytest.fixture(scope="session")
def own_texts(saved_target, tmp_path_factory) -> Path:
    """JSON lines of what `saved_target` says itself after a dozen prompts, as token ids under the loss."""
    model = LlamaForCausalLM.from_pretrained(saved_target)
    prompts = torch.randint(3, BYTE_VOCAB_SIZE, (12, 6), generator=torch.Generator().manual_seed(0))
    ids = model.generate(prompts, max_new_tokens=42, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    path = tmp_path_factory.mktemp("data") / "own.jsonl"
    rows = [{"input_ids": row, "loss_mask": [False] * 6 + [True] * 42} for row in ids.tolist()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def make_recipe_values(saved_target, own_texts):
    """Factory of recipes as plain values: EAGLE-3 on a CPU, a second or two; they write into the folder given."""

    def make(folder: Path) -> dict:
        return {
            "target": {"path": str(saved_target)},
            "data": {"train": str(own_texts), "eval": str(own_texts), "max_length": 48},
            "method": {"name": "eagle3", "options": {"steps": 3}},
            "training": {
                "max_steps": 4,
                "per_device_train_batch_size": 4,
                "learning_rate": 3e-3,
                "logging_steps": 1,
                "eval_steps": 2,
                "use_cpu": True,
                "disable_tqdm": True,
                "seed": 0,
            },
            "evaluation": {"num_prompts": 2, "max_new_tokens": 10, "nodes": [4], "num_rows": 4},
            "output": {"folder": str(folder)},
        }

    return make


@pytest.fixture
def recipe_values(make_recipe_values, tmp_path) -> dict:
    """A recipe as plain values that writes into the test's folder, see `make_recipe_values`."""
    return make_recipe_values(tmp_path / "out")
