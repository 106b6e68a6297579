"""A real code model with the head that is bundled for it, where its file is on this machine."""

from __future__ import annotations

import pytest
import torch

from hf_speculate import AutoSpeculator, load_gguf
from hf_speculate.testing import check_lossless
from hf_speculate_gguf.named import QWEN_CODER
from hf_speculate_tools.commands import bundled


TASKS = ["Write a Python function that reverses a string.", "Why is the sky blue?"]


@pytest.fixture(scope="module", name="target")
def _target():
    """Model in float32 and tokenizer."""
    path = QWEN_CODER.find()
    if path is None:
        pytest.skip(f"{QWEN_CODER.name} is not on this machine")
    return load_gguf(path, dtype=torch.float32)


@pytest.mark.parametrize("drafter", ["{head}", "{head}+suffix"])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.95}])
def test_coder_head_gives_plain_text(target, drafter, sampling):
    model, tokenizer = target
    speculator = AutoSpeculator.from_pretrained(drafter.format(head=bundled(QWEN_CODER.head)), target=model)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": task}], add_generation_prompt=True, tokenize=False)
        for task in TASKS
    ]
    prompts = [tokenizer(chat, add_special_tokens=False, return_tensors="pt")["input_ids"] for chat in chats]
    seeds = (0, 1) if sampling["do_sample"] else (None,)
    check_lossless(model, speculator, prompts, seeds=seeds, max_new_tokens=24, **sampling)
    assert speculator.stats.mean_acceptance_length > 2, "the head is the target's, and reads the right layers"
