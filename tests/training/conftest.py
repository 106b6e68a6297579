"""A byte-level tokenizer built on the spot, and data files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAD, START, END = 0, 1, 2
BYTE_VOCAB_SIZE = 3 + 256


def build_byte_tokenizer(chat_template: str | None = CHATML, model_max_length: int = 256) -> PreTrainedTokenizerFast:
    """A token for each byte; 0 is padding, 1 and 2 begin and end a turn."""
    specials = {"<|pad|>": PAD, "<|im_start|>": START, "<|im_end|>": END}
    letters = {letter: 3 + i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab={**specials, **letters}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
        model_max_length=model_max_length,
    )


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
    """What `datasets` converts and maps stays in the test's folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture(scope="session")
def saved_target(tmp_path_factory) -> Path:
    """Folder of a tiny random Llama with the byte tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=BYTE_VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)
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
            "evaluation": {"num_prompts": 3, "max_new_tokens": 16, "nodes": [4], "num_rows": 4},
            "output": {"folder": str(folder)},
        }

    return make


@pytest.fixture
def recipe_values(make_recipe_values, tmp_path) -> dict:
    """A recipe as plain values that writes into the test's folder, see `make_recipe_values`."""
    return make_recipe_values(tmp_path / "out")
