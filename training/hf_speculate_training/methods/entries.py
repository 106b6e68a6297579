"""Entries: the predictions that count, each with the distribution of the target that it is compared with.

An entry is (step, row, index): unrolled step (or Medusa head) k at token i of a row. It predicts token i + 2 + k, and
its teacher is the target's distribution at token i + 1 + k. (Token i + 1 is the root when decoding: the target chose
it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, distributed

from ..data import NO_DOCUMENT, Batch


def counted_entries(batch: Batch, num_steps: int) -> Bool[Tensor, "K B S"]:
    """The entries of each unrolled step (or head) that decoding will use.

    Entry i of step k sits at token i and predicts token i + 2 + k after tokens i + 1 … i + 1 + k. It counts if the
    target is to emit all of these, in the document of token i. (The target itself chooses the first token of an answer
    after the prompt, and no draft crosses the user's next turn.)
    """
    document_ids, loss_mask = batch["document_ids"], batch["loss_mask"].bool()
    emitted = loss_mask & (document_ids != NO_DOCUMENT)
    counted = emitting_positions(batch)
    steps = []
    for step in range(num_steps):
        same_document = _ahead(document_ids, step + 2, NO_DOCUMENT) == document_ids
        counted = counted & _ahead(emitted, step + 2, False) & same_document
        steps.append(counted)
    return torch.stack(steps)


def emitting_positions(batch: Batch) -> Bool[Tensor, "B S"]:
    """The tokens after which the target is to emit the next one, in the same document."""
    document_ids = batch["document_ids"]
    emitted = batch["loss_mask"].bool() & (document_ids != NO_DOCUMENT)
    return _ahead(emitted, 1, False) & (_ahead(document_ids, 1, NO_DOCUMENT) == document_ids)


def _ahead(values: Tensor, distance: int, fill: int | bool) -> Tensor:
    """`values[b, i + distance]`, `fill` after the end."""
    shifted = torch.full_like(values, fill)
    if distance < values.shape[1]:
        shifted[:, : values.shape[1] - distance] = values[:, distance:]
    return shifted


def tokens_ahead(input_ids: Int[Tensor, "B S"], distance: int) -> Int[Tensor, "B S"]:
    """`input_ids[b, i + distance]`; token 0 after the end, where no entry counts."""
    return _ahead(input_ids, distance, 0)


@dataclass(frozen=True)
class Entries:
    """E entries of a batch, by step, then row, then index.

    Attributes:
        counted: bool [K, B, S], True where there is an entry.
        step: int64 [E], the step of each entry.
        label: int64 [E], the token of the text that each entry predicts.
        teacher_row: int64 [E], the teacher of each entry, as index into the T positions at which one is needed.
        teacher_positions: bool [B, S], those positions.
        num_eligible: float [K], number of entries of each step before `only`.
        num_tokens: float scalar, number of tokens of the batch, without padding.
    """

    counted: Bool[Tensor, "K B S"]
    step: Int[Tensor, " E"]
    label: Int[Tensor, " E"]
    teacher_row: Int[Tensor, " E"]
    teacher_positions: Bool[Tensor, "B S"]
    num_eligible: Float[Tensor, " K"]
    num_tokens: Float[Tensor, ""]

    @classmethod
    def of(cls, batch: Batch, num_steps: int, device: torch.device) -> Entries:
        """All entries that decoding will use, see `counted_entries`."""
        counted = counted_entries(batch, num_steps).to(device)
        step, row, index = counted.nonzero(as_tuple=True)
        positions = index + 1 + step
        needed = torch.zeros_like(counted[0])
        needed[row, positions] = True
        order = needed.flatten().cumsum(0).view_as(needed) - 1
        label = batch["input_ids"].to(device)[row, positions + 1]
        num_eligible = counted.flatten(1).sum(1).float()
        num_tokens = (batch["document_ids"] != NO_DOCUMENT).sum().float().to(device)
        return cls(counted, step, label, order[row, positions], needed, num_eligible, num_tokens)

    def __len__(self) -> int:
        return len(self.step)

    def only(self, kept: Bool[Tensor, " E"]) -> Entries:
        """A part of the entries. The numbers and the teacher's positions stay."""
        counted = self.counted.clone()
        counted[self.counted] = kept
        parts = {name: getattr(self, name)[kept] for name in ("step", "label", "teacher_row")}
        return replace(self, counted=counted, **parts)

    def gather(self, states: Sequence[Float[Tensor, "B S H"]]) -> Float[Tensor, "E H"]:
        """The rows of the entries, from one tensor for each step."""
        return torch.cat([step[mask] for step, mask in zip(states, self.counted, strict=True)])

    def weights(self, decay: float) -> Float[Tensor, " E"]:
        """Weight of each entry's loss: `decay**step / n`.

        n is the number of tokens of the batch over all processes (`shared_size`), by which SafeAILab, SpecForge and
        DeepSpec divide; steps that reach past the end of an answer then count less.
        """
        steps = torch.arange(len(self.counted), device=self.step.device, dtype=torch.long)
        return (decay**steps / shared_size(self.num_tokens))[self.step]

    def metrics(
        self, losses: Float[Tensor, " E"], hits: Bool[Tensor, " E"], learnt: Bool[Tensor, " E"] | None = None
    ) -> dict[str, Float[Tensor, ""]]:
        """`loss_k` and `accuracy_k` of every step k; 0 for a step without entries.

        The accuracy is the share of hits (the best draft token is right) in the eligible entries. The mean loss is that
        of the entries that are learnt; None for all.
        """
        num_steps = len(self.counted)
        counted = torch.ones_like(self.step, dtype=torch.float32) if learnt is None else learnt.float()
        zeros = torch.zeros(num_steps, device=self.step.device, dtype=torch.float32)
        mean_losses = zeros.index_add(0, self.step, losses.float() * counted)
        mean_losses = mean_losses / zeros.index_add(0, self.step, counted).clamp(min=1)
        accuracies = zeros.index_add(0, self.step, hits.float()) / self.num_eligible.clamp(min=1)
        named = {f"loss_{k}": mean_losses[k] for k in range(num_steps)}
        return named | {f"accuracy_{k}": accuracies[k] for k in range(num_steps)}


def shared_size(size: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """The divisor of a process' sums that makes the mean of all losses the loss of all rows together.

    DDP averages gradients as if all processes learnt from equally much. If each divided by a count of its own, a token
    would count more in a process that has few. The divisor is the mean over the processes, which all call this with the
    same shape: one small all-reduce, made only if gradients are computed.
    """
    if not (distributed.is_available() and distributed.is_initialized() and torch.is_grad_enabled()):
        return size
    total = size.detach().clone()
    distributed.all_reduce(total)
    return total / distributed.get_world_size()
