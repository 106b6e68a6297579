"""Losses and weights of single proposals.

Logits over the vocabulary are the largest tensors of training, and the losses need several of that size. So they are
made for a few proposals at a time, and again in the backward. (`lean_cross_entropy` goes by columns instead, but the L1
distance needs the normalisers of both distributions before its first column.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_speculate_plugins.block import BlockHead

from ..losses import CHUNK_BYTES, Teacher


# [E, Vd] tensors that live at once in a backward: logits, both distributions and the gradients of all.
_TEMPORARIES = 8

SlotLosses = dict[str, Tensor]
"""Tensors [E] of E proposals. With a graph: "cross_entropy" against the text's token (0 if the draft vocabulary lacks
it), "l1" and "kl" against the target's distribution. Without: "best", the best draft column, int64."""


@dataclass(frozen=True)
class SlotRows:
    """E proposals.

    Attributes:
        states: [E, H], states of their slots.
        markov: [E, r], inputs of the Markov head's output matrix; None without such a head.
        labels: int64 [E], draft column of the text's token, -1 if there is none.
        teachers: int64 [E], row of each proposal's teacher in `hidden`.
        hidden: [T, Ht], last hidden states of the target.
    """

    states: Float[Tensor, "E H"]
    markov: Float[Tensor, "E r"] | None
    labels: Int[Tensor, " E"]
    teachers: Int[Tensor, " E"]
    hidden: Float[Tensor, "T Ht"]

    def __len__(self) -> int:
        return len(self.states)

    def part(self, part: slice) -> SlotRows:
        markov = None if self.markov is None else self.markov[part]
        return SlotRows(self.states[part], markov, self.labels[part], self.teachers[part], self.hidden)


def slot_losses(head: BlockHead, teacher: Teacher, rows: SlotRows, names: Collection[str]) -> SlotLosses:
    """The losses of these names, always the cross-entropy, and the best columns."""
    size = max(CHUNK_BYTES // (4 * _TEMPORARIES * head.spec.draft_vocab_size), 1)
    starts = range(0, max(len(rows), 1), size)  # without proposals, too, parameters need a gradient
    parts = []
    for start in starts:
        args = (head, teacher, rows.part(slice(start, start + size)), names)
        if len(starts) > 1 and torch.is_grad_enabled():
            parts.append(checkpoint(_part_losses, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_part_losses(*args))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _part_losses(head: BlockHead, teacher: Teacher, rows: SlotRows, names: Collection[str]) -> SlotLosses:
    logits = draft_logits(head, rows.states, rows.markov)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_draft = logits.log_softmax(-1)
    chosen = log_draft.gather(1, rows.labels.clamp(min=0)[:, None])[:, 0]
    losses = {"cross_entropy": -chosen.where(rows.labels >= 0, 0.0), "best": logits.detach().argmax(-1)}
    if "l1" in names or "kl" in names:
        log_target = _log_target(teacher, rows, logits)
        target = log_target.exp()
        if "l1" in names:
            losses["l1"] = (log_draft.exp() - target).abs().sum(-1)
        if "kl" in names:
            losses["kl"] = (target * (log_target - log_draft)).sum(-1)
    return losses


@torch.no_grad()
def _log_target(teacher: Teacher, rows: SlotRows, like: Float[Tensor, "E Vd"]) -> Float[Tensor, "E Vd"]:
    """The target's log-probabilities over the draft vocabulary. Neighbouring blocks share teachers."""
    needed, where = rows.teachers.unique(return_inverse=True)
    logits = teacher.read(rows.hidden[needed]).columns(0, like.shape[1])
    return logits.to(like).log_softmax(-1)[where]


def draft_logits(
    head: BlockHead, states: Float[Tensor, "E H"], markov: Float[Tensor, "E r"] | None
) -> Float[Tensor, "E Vd"]:
    """The logits of decoding: those of the slots, plus the bias of the Markov head."""
    shared = head.shared["lm_head"]
    if shared is not None and shared.weight.is_floating_point() and not torch.is_autocast_enabled(states.device.type):
        states = states.to(shared.weight.dtype)  # a 16-bit matrix of the target's would be as large in float32 again
    logits = head.logits(states[None])[0]
    return logits if markov is None else logits + head.markov_head.bias(markov)


def decay_weights(counted: Bool[Tensor, "B A D"], decay: float | None) -> Float[Tensor, "B A D"]:
    """Weights `exp(-k / decay)` of the k-th proposal of a block; 1 for None."""
    depths = torch.arange(counted.shape[-1], device=counted.device, dtype=torch.long)
    weights = torch.ones_like(depths, dtype=torch.float32) if decay is None else torch.exp(-depths / decay)
    return weights * counted
