"""Heads with random weights at the shape of a target: what they cost, without training them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_speculate.commands import ModelShape
from hf_speculate.drafting import Drafter
from hf_speculate.models import GenerativeModel

from .. import block
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
    _fill(head, target)
    ids = torch.arange(draft_vocab_size, device=target.device) if draft_vocab_size else None
    return EagleDrafter(LoadedHead(head, ids, LoadReport("random weights")), target)


def _block(target: GenerativeModel, shape: ModelShape, num_layers: int, block_size: int, markov_rank: int) -> Drafter:
    """A one-pass head of the target's width: DSpark with a Markov head, else DFlash; the target's output matrix."""
    is_dspark = markov_rank > 0
    spec = block.BlockSpec(
        dialect="deepspec" if is_dspark else "zlab",
        method="dspark" if is_dspark else "dflash",
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        draft_vocab_size=shape.vocab_size,
        num_layers=num_layers,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        block_size=block_size,
        mask_token_id=shape.vocab_size - 1,
        feature_layers=(1,) * 5,  # five, as the published ones; which ones costs nothing
        first_slot=0 if is_dspark else 1,
        causal=(False,) * num_layers,
        windows=(None,) * num_layers,
        markov="vanilla" if is_dspark else None,
        markov_rank=markov_rank,
    )
    with torch.device("meta"):
        head = block.BlockHead(spec, target.get_input_embeddings(), target.get_output_embeddings())
    _fill(head, target)
    loaded = block.LoadedHead(head, None, LoadReport("random weights"))
    return block.BlockDrafter(loaded, target, block.BlockOptions(max_nodes=16))


def _fill(head: EagleHead | block.BlockHead, target: GenerativeModel) -> None:
    """Random weights of the target's dtype, on its device."""
    weights = {name: torch.randn(p.shape, dtype=target.dtype).mul_(0.02) for name, p in head.named_parameters()}
    head.load_state_dict({name: weight.to(target.device) for name, weight in weights.items()}, assign=True)
    head.rotary.to(target.device)
    head.requires_grad_(False).eval()


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
    "dflash": ("DFlash, 5 layers, block of 16, the target's output matrix", lambda t, s: _block(t, s, 5, 16, 0)),
    "dspark": ("DSpark, 2 layers, block of 7, Markov rank 256", lambda t, s: _block(t, s, 2, 7, 256)),
    "medusa": ("Medusa, 5 heads with matrices of their own", lambda t, s: _medusa(t, s, True)),
    "medusa-v2": ("Medusa, 5 heads, the target's output matrix", lambda t, s: _medusa(t, s, False)),
}
