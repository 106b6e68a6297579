"""An `EagleHead` without weights from a spec that came from a file."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from hf_speculate.errors import CheckpointError

from ..head import EagleHead
from ..spec import EagleSpec


# Of the longest text that RoPE is tried with; float32 counts to here.
_MAX_POSITION = 1 << 24


def build_head(spec: EagleSpec, folder: str, embed_tokens: nn.Module | None, lm_head: nn.Module | None) -> EagleHead:
    """The head on the meta device.

    Raises:
        CheckpointError: an unknown activation, or RoPE parameters that give no angles, for short texts or for long.
    """
    try:
        with torch.device("meta"):
            head = EagleHead(spec, embed_tokens, lm_head)
        angles = _angles(head)
    except Exception as error:  # what is wrong with types of RoPE and activations, transformers says in several ways
        raise CheckpointError(
            f"{folder}: config.json makes no EAGLE head ({type(error).__name__}: {error}); RoPE is {spec.rope}, the "
            f"activation {spec.hidden_act!r}."
        ) from error
    if not all(part.isfinite().all() and part.shape[-1] == spec.head_dim for part in angles):
        raise CheckpointError(f"{folder}: RoPE with {spec.rope} (config.json) gives no {spec.head_dim} angles.")
    return head


def _angles(head: EagleHead) -> list[Tensor]:
    """Cosines and sines at positions on both sides of every length at which a type of RoPE changes what it does."""
    spec = head.spec
    original = int(spec.rope.get("original_max_position_embeddings") or 1)
    rotary, states = copy.deepcopy(head.rotary), torch.zeros(1, 1, spec.hidden_size)  # a copy: it remembers lengths
    positions = (min(length, _MAX_POSITION) for length in (1, 2 * original, 2 * spec.max_position_embeddings))
    return [part for position in positions for part in rotary(states, torch.tensor([[position]]))]
