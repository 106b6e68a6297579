"""Builders for the tests of the trainer: a byte-level tokenizer, a saved target, packed batches, recipes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_speculate import Speculator
from hf_speculate_training.data import NO_DOCUMENT, Batch
from hf_speculate_training.methods import StepOutput

from .models import SIZES, VOCAB_SIZE
from .models import build_tiny_model as build_tiny_model


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


def save_target(folder: Path) -> None:
    """Writes a tiny random Llama with the byte tokenizer."""
    tokens = {"vocab_size": BYTE_VOCAB_SIZE, "bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
    config = LlamaConfig(**SIZES | tokens, num_hidden_layers=2)
    torch.manual_seed(0)
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)


def recipe_file(values: Mapping[str, Any], folder: Path) -> Path:
    """A recipe's plain values as `recipe.yaml` in `folder`."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def packed(*rows: list[int], masked: float = 0.0) -> Batch:
    """Rows of documents of these lengths; a negative length is padding. `masked` is the share of prompt tokens."""
    torch.manual_seed(0)
    size = sum(map(abs, rows[0]))
    documents = [[i if n > 0 else NO_DOCUMENT for i, n in enumerate(row) for _ in range(abs(n))] for row in rows]
    positions = [[p for n in row for p in range(abs(n))] for row in rows]
    return Batch(
        input_ids=torch.randint(3, VOCAB_SIZE, (len(rows), size)),
        position_ids=torch.tensor(positions),
        document_ids=torch.tensor(documents),
        loss_mask=(torch.rand(len(rows), size) >= masked) & (torch.tensor(documents) != NO_DOCUMENT),
    )


def assert_same_gradients(module: nn.Module, ours: torch.Tensor, theirs: torch.Tensor, rtol: float = 1e-6) -> None:
    """Two losses have the same gradients, relative to the largest of each parameter; and every parameter learns."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    both = (torch.autograd.grad(loss, parameters) for loss in (ours, theirs))
    for name, grad, wanted in zip(names, *both, strict=True):
        scale = float(wanted.abs().max())
        assert scale > 0, f"nothing is learnt by {name}"
        assert float((grad - wanted).abs().max()) <= rtol * scale, name


def assert_nothing_learnt(module: nn.Module, output: StepOutput) -> None:
    """The loss is 0, and every parameter has a gradient, of zeros."""
    output.loss.backward()
    assert output.loss.item() == 0
    assert all((p.grad == 0).all() for p in module.parameters())
    assert all(value.isfinite() for value in output.metrics.values())


def own_text(target: Any, length: int, vocab_size: int = VOCAB_SIZE) -> tuple[torch.Tensor, Batch]:
    """Two prompts of 5 tokens, and the target's greedy text after them, of this length, as a batch."""
    torch.manual_seed(0)
    prompts = torch.randint(3, vocab_size, (2, 5))
    batch = packed([length], [length])
    batch["input_ids"] = target.generate(prompts, max_new_tokens=length - 5, do_sample=False)
    return prompts, batch


def learn_by_heart(method: Any, batch: Batch, states: Any, depth: int, num_steps: int, lr: float) -> StepOutput:
    """Trains until every draft of `depth` tokens is right; returns the last output."""
    optimizer = torch.optim.Adam(method.parameters(), lr=lr)
    for _ in range(num_steps):
        optimizer.zero_grad()
        output = method(batch, states)
        if all(float(output.metrics[f"accuracy_{k}"]) == 1 for k in range(depth)):
            return output
        output.loss.backward()
        optimizer.step()
    raise AssertionError(f"not learnt: {output.metrics}")


def assert_every_draft_is_accepted(target: Any, drafter: Any, prompts: torch.Tensor, text: torch.Tensor) -> Speculator:
    """A drafter that knows `text` by heart drafts it, to the last token."""
    speculator = Speculator(drafter)
    length = text.shape[1] - prompts.shape[1]
    again = target.generate(prompts, max_new_tokens=length, do_sample=False, speculator=speculator)
    assert torch.equal(again, text)
    assert set(speculator.stats.acceptance_rate_by_depth.values()) == {1.0}
    return speculator


def chats(count: int, turns: int = 1) -> Dataset:
    """Conversations whose prompts have different lengths; the answers of the data are never to be seen again."""
    conversations = []
    for number in range(count):
        messages = []
        for turn in range(turns):
            messages.append({"role": "user", "content": f"question {number} {'x' * (number % 7)} {turn}"})
            messages.append({"role": "assistant", "content": "of the data"})
        conversations.append(messages)
    return Dataset.from_dict({"messages": conversations})
