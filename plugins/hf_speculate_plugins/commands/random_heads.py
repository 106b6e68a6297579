"""Heads with random weights at the shape of a target: what they cost, without training them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_speculate.commands import ModelShape
from hf_speculate.drafting import Drafter
from hf_speculate.models import GenerativeModel

from ..checkpoints import LoadReport
from ..eagle import EagleDrafter, EagleHead, EagleSpec, LoadedHead
from ..medusa import MedusaDrafter, MedusaHeads


def _eagle3(target: GenerativeModel, shape: ModelShape, draft_vocab_size: int | None) -> Drafter:
    """An EAGLE-3 head of one layer of the target's shape; without a draft vocabulary it uses the target's lm_head."""
    spec = EagleSpec(
        dialect="safeailab",
        version=3,
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        draft_vocab_size=draft_vocab_size or shape.vocab_size,
        num_layers=1,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        feature_layers=(
            0,
            1,
            shape.num_hidden_layers - 1,
        ),  # as a model with few layers has them, too: which ones costs nothing
    )
    lm_head = None if draft_vocab_size else target.get_output_embeddings()
    with torch.device("meta"):
        head = EagleHead(spec, target.get_input_embeddings(), lm_head)
    weights = {name: torch.randn(p.shape, dtype=target.dtype).mul_(0.02) for name, p in head.named_parameters()}
    head.load_state_dict({name: weight.to(target.device) for name, weight in weights.items()}, assign=True)
    head.rotary.to(target.device)
    ids = torch.arange(draft_vocab_size, device=target.device) if draft_vocab_size else None
    return EagleDrafter(LoadedHead(head.requires_grad_(False).eval(), ids, LoadReport("random weights")), target)


def _medusa(target: GenerativeModel, shape: ModelShape, own_output: bool) -> Drafter:
    """Five Medusa heads of one block, with output matrices of their own or the target's."""
    size = shape.hidden_size
    output = torch.randn(5, shape.vocab_size, size, dtype=target.dtype).mul_(0.02) if own_output else None
    blocks = torch.randn(5, 1, size, size, dtype=target.dtype).mul_(0.02)
    heads = MedusaHeads(blocks, torch.zeros(5, 1, size, dtype=target.dtype), output)
    return MedusaDrafter(heads.to(target.device), target)


HEADS: dict[str, tuple[str, Callable[[GenerativeModel, ModelShape], Drafter]]] = {
    "eagle3-32k": (
        "EAGLE-3, own output matrix of 32000 tokens",
        lambda t, s: _eagle3(t, s, min(32000, s.vocab_size // 2)),
    ),
    "eagle3-shared": ("EAGLE-3, the target's output matrix", lambda t, s: _eagle3(t, s, None)),
    "medusa": ("Medusa, 5 heads with matrices of their own", lambda t, s: _medusa(t, s, True)),
    "medusa-v2": ("Medusa, 5 heads, the target's output matrix", lambda t, s: _medusa(t, s, False)),
}
