"""The draft vocabulary: the tokens that a target emits most."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PretrainedConfig

from ..data import Batch
from ..sections import RecipeError
from .contract import SMALL_HIDDEN_SIZE, CountTokens


DRAFT_VOCAB_SIZE = "draft_vocab_size"
_SMALL_VOCABULARY = 16384


def count_tokens(batches: Iterable[Batch], vocab_size: int) -> Int[Tensor, " V"]:
    """How often each token is one that the target is to emit (`loss_mask`)."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for batch in batches:
        counts += torch.bincount(batch["input_ids"][batch["loss_mask"].bool()].cpu(), minlength=vocab_size)
    return counts


def draft_vocabulary(counts: Int[Tensor, " V"], size: int) -> Int[Tensor, " Vd"]:
    """The `size` most frequent tokens, ascending.

    Of tokens equally frequent (those that never occur, too) the lowest ids are taken, as SpecForge fills up.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"a draft vocabulary has 1 to {len(counts)} tokens, not {size}.")
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def suggested_vocabulary(config: PretrainedConfig) -> int | None:
    """How many tokens a draft vocabulary should have; None: all of them.

    With the output matrix of a large vocabulary a small head would do little else. EAGLE-3 drafts with 32000 of
    Llama's 128256 tokens, SpecForge with 16000 for small Qwen models. Of what SmolLM2 says in held-out chats 8192 of
    its 49152 tokens are 94 %, 4096 were 87 %; twice as many make a draft a tenth slower (docs/log.md).
    """
    hidden_size = config.hidden_size
    size = 32000 if hidden_size >= 2048 else 16000 if hidden_size >= SMALL_HIDDEN_SIZE else 8192
    return size if config.vocab_size >= 2 * size and config.vocab_size > _SMALL_VOCABULARY else None


def choose_vocabulary(size: int | None, vocab_size: int, count_tokens: CountTokens) -> Int[Tensor, " Vd"] | None:
    """What a recipe's `method.head.draft_vocab_size` asks for: the most frequent tokens; None for the whole vocabulary.

    Raises:
        RecipeError: a size that is not from 1 to the target's vocabulary.
    """
    if size is None or size == vocab_size:
        return None
    if not 1 <= size < vocab_size:
        raise RecipeError(f"method.head.{DRAFT_VOCAB_SIZE} must be from 1 to the target's {vocab_size}, got {size}.")
    return draft_vocabulary(count_tokens(), size)
