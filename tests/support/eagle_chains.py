"""Draft logits of an EAGLE head at many places of a text at once, with gradients: the reference of sessions' chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_speculate.tree import additive
from hf_speculate_plugins.eagle import EagleHead
from hf_speculate_plugins.heads import CachedAttention


def chain_logits(head: EagleHead, token_ids: Tensor, states: Tensor, entries: Sequence[int], depth: int) -> Tensor:
    """[P, D, Vd]: draft logits of chains that start at each of P entries, fed with the text's own tokens.

    Entry i pairs the state at i with token i + 1, its first logits are for token i + 2. The chain of an entry sees the
    entries of the text up to its own, and its own additions.

    Args:
        token_ids: int64 [S], the text.
        states: [1, S, Hd] from `EagleHead.fuse`.
        entries: places of the entries, ascending; the last must leave `depth` tokens of the text after its own token.
    """
    count, device = len(token_ids) - 1, head.device
    tokens, starts = token_ids.to(device), torch.tensor(entries, device=device)
    cache: Any = DynamicCache()
    positions = torch.arange(count, device=device)[None]
    causal = positions[0, :, None] - positions
    masks = [_mask((causal >= 0) & (causal < (window or count)), head.dtype) for window in head.spec.windows]
    hidden = head(tokens[None, 1:], states[:, :count], positions, CachedAttention(cache, masks))[:, starts]
    logits, states = head.read(hidden)
    steps = [logits[0]]
    for step in range(1, depth):
        masks = [_step_mask(count, starts, step, window, head.dtype) for window in head.spec.windows]
        if head.spec.parallel:
            chosen, states = head.masks(1, len(entries))
        else:
            chosen = tokens[starts + 1 + step][None]
        hidden = head(chosen, states, (starts + step)[None], CachedAttention(cache, masks))
        logits, states = head.read(hidden)
        steps.append(logits[0])
    return torch.stack(steps, dim=1)


def _step_mask(count: int, starts: Tensor, step: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Mask of step `step` (from 1) of all chains: the text up to the own entry, and the chain's own steps."""
    places = torch.arange(count, device=starts.device)
    own = torch.eye(len(starts), dtype=torch.bool, device=starts.device)
    ends = starts[:, None] + step
    blocks = [(places <= starts[:, None]) & (ends - places < (window or count + step))]
    blocks += [own & (step - earlier < (window or count + step)) for earlier in range(1, step + 1)]
    return _mask(torch.cat(blocks, dim=1), dtype)


def _mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return additive(visible, dtype)[None, None]
