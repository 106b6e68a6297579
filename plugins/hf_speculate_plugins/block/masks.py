"""What the slots of a block see: the context before the anchor, and one another."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hf_speculate.tree import additive

from .spec import BlockSpec


def block_masks(
    spec: BlockSpec,
    positions: Int[Tensor, "B S"],
    context_positions: Int[Tensor, "B M"],
    visible: Bool[Tensor, "B M"] | None,
    dtype: torch.dtype,
) -> list[Float[Tensor, "B 1 S T"] | None]:
    """Additive masks over context and block, one a layer; None: every slot sees all.

    Args:
        positions: of the slots.
        context_positions: of the context entries.
        visible: which of these are real; None if all are.
    """
    known: dict[tuple[bool, int | None], Tensor | None] = {}
    for kind in zip(spec.causal, spec.windows, strict=True):
        if kind not in known:
            known[kind] = _mask(spec, *kind, positions, context_positions, visible, dtype)
    return [known[kind] for kind in zip(spec.causal, spec.windows, strict=True)]


def _mask(
    spec: BlockSpec,
    causal: bool,
    window: int | None,
    positions: Tensor,
    context_positions: Tensor,
    visible: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    if visible is None and not causal and window is None:
        return None
    queries = positions[:, :, None]
    is_seen = torch.ones_like(queries, dtype=torch.bool).expand(-1, -1, context_positions.shape[1])
    if visible is not None:
        is_seen = is_seen & visible[:, None]
    among = torch.ones(len(positions), spec.block_size, spec.block_size, dtype=torch.bool, device=positions.device)
    if window is not None:
        ends = positions[:, :1, None] if spec.window_from_anchor else queries
        # From the anchor: so many context entries; from a slot: so many entries, its own among them.
        reach = window + 1 if spec.window_from_anchor else window
        is_seen = is_seen & (ends - context_positions[:, None] < reach)
        if not spec.window_from_anchor:
            among = among & ((queries - positions[:, None]).abs() < window)
    if causal:
        among = among & (positions[:, None] <= queries)
    return additive(torch.cat([is_seen, among], dim=-1), dtype)[:, None]
