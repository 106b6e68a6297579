"""Attention of a head whose drafting is unrolled over a whole text at once ("training-time test" of EAGLE-3).

In decoding, a head at its k-th draft token sees the entries that were read from the target's features, up to the
root's, and the k entries that it drafted itself. At index i of a text these are every step-0 key at or before i, in the
same document, and the keys of steps 1 to k at index i alone (arXiv:2503.01840, section 3.2). So a step needs one
[S, S] block of scores and k columns, not a [S, (k + 1) S] mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...states import visible


# Keys and values of each layer in one step, [B, kv_heads, S, d].
StepMemory = tuple[tuple[Tensor, Tensor], ...]


class UnrolledAttention:
    """`attend` of one unrolled step, with masks (`step_masks`) and sliding windows by layer.

    The memory of the earlier steps, oldest first, is never written to, because gradient checkpointing may run a step
    again. `added` is that of this step, complete after the forward of all layers.
    """

    def __init__(
        self,
        masks: Sequence[Bool[Tensor, "B 1 S S"]],
        windows: Sequence[int | None],
        memory: Sequence[StepMemory],
    ):
        self.masks, self.windows, self.memory = masks, windows, memory
        self._added: list[tuple[Tensor, Tensor]] = []

    @property
    def added(self) -> StepMemory:
        return tuple(self._added)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # Rotary embeddings come in the dtype of the states, which under autocast is not that of the products.
        queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        self._added.append((keys, values))
        mask = self.masks[layer]
        if not self.memory:
            grouped = keys.shape[1] != queries.shape[1]
            return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)
        first_keys, first_values = self.memory[0][layer]
        drafted = [*(step[layer] for step in self.memory[1:]), (keys, values)]
        window = self.windows[layer]
        if window is not None:
            drafted = drafted[-window:]
        return _mix(queries, first_keys, first_values, mask, drafted)


def _mix(
    queries: Float[Tensor, "B h S d"],
    keys: Float[Tensor, "B g S d"],
    values: Float[Tensor, "B g S d"],
    mask: Bool[Tensor, "B 1 S S"],
    drafted: Sequence[tuple[Float[Tensor, "B g S d"], Float[Tensor, "B g S d"]]],
) -> Float[Tensor, "B h S d"]:
    """Attention over `keys` under `mask` and, at every index, over the drafted keys of that index."""
    length, groups = queries.shape[2], keys.shape[1]
    # Query heads that share a key head are stacked, so that keys need not be repeated.
    stacked = (queries * queries.shape[-1] ** -0.5).unflatten(1, (groups, -1))
    scores = (stacked.flatten(2, 3) @ keys.mT).unflatten(2, (-1, length))
    scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    own = [(stacked * key[:, :, None]).sum(-1, keepdim=True) for key, _ in drafted]
    probs = torch.cat([scores, *own], dim=-1).softmax(-1).to(values.dtype)
    first, *others = probs.split([length, *[1] * len(drafted)], dim=-1)
    mixed = (first.flatten(2, 3) @ values).unflatten(2, (-1, length))
    for prob, (_, value) in zip(others, drafted, strict=True):
        mixed = mixed + prob * value[:, :, None]
    return mixed.flatten(1, 2)


def step_masks(
    document_ids: Int[Tensor, "B S"],
    position_ids: Int[Tensor, "B S"],
    windows: Sequence[int | None],
    step: int,
) -> list[Bool[Tensor, "B 1 S S"]]:
    """Masks of the step-0 keys that the queries of a step see, for each layer: same document, not later, in the window.

    A query of step k stands k positions after its index.
    """
    seen = visible(document_ids)
    by_window: dict[int | None, Tensor] = {}
    for window in windows:
        if window not in by_window:
            near = seen
            if window is not None:
                near = seen & (position_ids[:, :, None] + step - position_ids[:, None, :] < window)
            by_window[window] = near[:, None]
    return [by_window[window] for window in windows]
