"""Models in folders for the tests of benchmarks."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ..support.inputs import character_tokenizer
from ..support.models import SIZES


@pytest.fixture(scope="session")
def bench_folders(tmp_path_factory):
    """`target` and `draft` of the same vocabulary, as users have them."""
    root, tokenizer = tmp_path_factory.mktemp("models"), character_tokenizer(pad_token="<pad>", bos_token="<s>")
    for name, seed in (("target", 0), ("draft", 1)):
        sizes = SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "eos_token_id": 2}
        config = Qwen2Config(**sizes, num_hidden_layers=2)
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root
