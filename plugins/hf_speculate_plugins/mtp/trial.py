"""A trial of a draft layer: can a decoder layer of the target's class run alone, as drafting calls it?

Classes call their layers in ways of their own. A layer that would raise in the first request, or after hours of
training, is refused before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hf_speculate.errors import TargetMismatchError, first_line

from ..heads import CachedAttention, FeedingHead


POSSIBLE = "Possible: an EAGLE-3, DSpark or Medusa head."
"""The end of messages about targets whose layers cannot draft."""

_PROMPT, _DRAFTED = 3, 2  # entries of the two forwards


@torch.no_grad()
def check_layer(head: FeedingHead[Any], name: str) -> None:
    """Runs a draft layer over a prompt, and over a draft after it.

    Args:
        name: name of the target's class, for the message.
    Raises:
        TargetMismatchError: the layer raised, or did not attend once over all entries.
    """
    is_training = head.training
    try:
        problem = _problem(head.eval())  # without dropout: no random numbers are drawn
    finally:
        head.train(is_training)
    if problem:
        raise TargetMismatchError(
            f"a decoder layer of {name} cannot run alone as a draft layer (MTP): {problem}. {POSSIBLE}"
        )


def _problem(head: FeedingHead[Any]) -> str:
    """The reason why a draft layer cannot run alone; "" if it can."""
    cache = DynamicCache()
    mask = torch.zeros(1, 1, _DRAFTED, _PROMPT + _DRAFTED, dtype=head.dtype, device=head.device)
    try:
        _run(head, 0, _PROMPT, CachedAttention(cache, is_causal=True))
        if (num_entries := cache.get_seq_length()) != _PROMPT:
            return f"it attends {num_entries // _PROMPT} times, not once"
        states = _run(head, _PROMPT, _DRAFTED, CachedAttention(cache, [mask]))
    except TargetMismatchError as error:
        return str(error)
    except Exception as error:  # a class of transformers may raise anything
        return f"{type(error).__name__}: {first_line(error)}"
    wanted = [1, _DRAFTED, head.spec.hidden_size]
    return "" if list(states.shape) == wanted else f"its states are {list(states.shape)}, not {wanted}"


def _run(head: FeedingHead[Any], first: int, count: int, attend: CachedAttention) -> Tensor:
    """The states of `count` entries from position `first` on."""
    tokens = torch.zeros(1, count, dtype=torch.long, device=head.device)
    positions = torch.arange(first, first + count, dtype=torch.long, device=head.device)[None]
    states = torch.ones(1, count, head.spec.hidden_size, dtype=head.dtype, device=head.device)
    return head(tokens, states, positions, attend, embeddings=states)
