"""Prompts, batches and a tokenizer, all without a file."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .models import VOCAB_SIZE


def random_prompt(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """int64 [1, length] without special tokens; half of it repeats, so that prompt lookup finds something."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    half = torch.randint(3, vocab_size, ((length + 1) // 2,), generator=generator)
    return torch.cat([half, half])[None, :length]


def character_tokenizer(**special_tokens: str) -> PreTrainedTokenizerFast:
    """The printable ASCII characters and the newline, one token each (as byte-level BPE spells them)."""
    characters = [chr(code) if code != 32 else "\u0120" for code in range(32, 127)] + ["\u010a"]
    raw = Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special_tokens)


def padded_batch(prompt, lengths):
    """Prompts of `lengths` tokens (fixture `prompt`), left padded, as arguments of `generate`."""
    width = max(lengths)
    rows = [torch.nn.functional.pad(prompt(n, seed=i)[0], (width - n, 0)) for i, n in enumerate(lengths)]
    mask = torch.stack([(torch.arange(width) >= width - n).long() for n in lengths])
    return {"input_ids": torch.stack(rows), "attention_mask": mask}
