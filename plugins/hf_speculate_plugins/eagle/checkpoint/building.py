"""An `EagleHead` without weights from a spec that came from a file."""

from __future__ import annotations

import torch
from torch import nn

from hf_speculate.errors import CheckpointError

from ...heads import sample_angles
from ..head import EagleHead
from ..spec import EagleSpec


def build_head(spec: EagleSpec, folder: str, embed_tokens: nn.Module | None, lm_head: nn.Module | None) -> EagleHead:
    """The head on the meta device.

    Raises:
        CheckpointError: an unknown activation, or RoPE parameters that give no angles, for short texts or for long.
    """
    try:
        with torch.device("meta"):
            head = EagleHead(spec, embed_tokens, lm_head)
        angles = sample_angles(head.rotary, spec)
    except Exception as error:  # what is wrong with types of RoPE and activations, transformers says in several ways
        raise CheckpointError(
            f"{folder}: config.json makes no EAGLE head ({type(error).__name__}: {error}); RoPE is {spec.rope}, the "
            f"activation {spec.hidden_act!r}."
        ) from error
    if not all(part.isfinite().all() and part.shape[-1] == spec.head_dim for part in angles):
        raise CheckpointError(f"{folder}: RoPE with {spec.rope} (config.json) gives no {spec.head_dim} angles.")
    return head
