"""Sessions of drafters that know nothing but text."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from hf_speculate import DraftRequest, DraftState


VOCAB_SIZE = 100
_CONFIG = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(vocab_size=VOCAB_SIZE))
_TARGET = SimpleNamespace(config=_CONFIG, get_input_embeddings=lambda: nn.Embedding(VOCAB_SIZE, 1))


def start(drafter, *texts, adapters=""):
    """A session that has seen the texts (left padded to one width): all but the last token as prompt."""
    prompts = [text[:-1] for text in texts]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    request = DraftRequest(
        target=_TARGET, input_ids=ids, attention_mask=None if mask.all() else mask, adapters=adapters
    )
    session = drafter.start(request)
    first = torch.tensor([[text[-1]] for text in texts])
    session.observe(torch.cat([ids[:, 1:], first], dim=1), {}, torch.full((len(texts),), width))
    return session


def state(*texts, max_depth=100, chains_only=False, active=None):
    """Of a round whose roots are the last tokens of the texts."""
    return DraftState(
        root_ids=torch.tensor([text[-1] for text in texts]),
        active=active or (True,) * len(texts),
        max_depth=max_depth,
        chains_only=chains_only,
        num_emitted=(1,) * len(texts),
    )
