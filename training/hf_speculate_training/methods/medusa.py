"""Training of Medusa heads on a frozen target (Medusa-1).

Source: Cai et al., "Medusa" (arXiv:2401.10774, sections 2.2.1 and 2.3.2). Head h on the state at token t
predicts token t + 2 + h of the text, and its loss has weight 0.8**h. If the target did not write the text, its own
distribution at token t + 1 + h is the better teacher (`soft`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_speculate.speculator import local_folder
from hf_speculate.target import GenerativeModel, is_dense, last_device
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads, MedusaOptions

from ..data import Batch
from ..states import TargetStates
from .contract import StepOutput
from .entries import Entries
from .heads import HeadMethod, copy_rows, detached_copy, refuse_added_tokens, target_rows, trainable
from .losses import EntryLosses, HardTargets, SoftTargets, Targets, cross_entropy


@dataclass(frozen=True, kw_only=True)
class MedusaShape:
    """The shape of fresh Medusa heads.

    Attributes:
        num_heads: number D of heads, and of tokens that are drafted ahead.
        num_layers: residual blocks of each head.
        shared_lm_head: True: all heads use the target's output matrix, which is not trained, and files are small.
            False: each has its own copy, as in the paper.
        draft_vocab_size: number of the most frequent tokens of the training data to draft with, through one matrix of
            the heads' own; None for the target's vocabulary.
    """

    num_heads: int = 4
    num_layers: int = 1
    shared_lm_head: bool = True
    draft_vocab_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class MedusaTrainingOptions:
    """Options for training Medusa heads.

    Attributes:
        head_decay: base of the losses' weights; head h has `head_decay**h`.
        soft: True learns the target's own distribution, False the text's token.
    """

    head_decay: float = 0.8
    soft: bool = False


def new_medusa(
    target: GenerativeModel, shape: MedusaShape, target_ids: Int[Tensor, " Vd"] | None = None
) -> MedusaHeads:
    """Fresh Medusa heads in float32, on the device of the target's last layer.

    Their blocks do nothing at first, so that each head predicts what the target does (paper, section 2.2). With a draft
    vocabulary the heads share one matrix of their own, the target's rows.
    """
    config = target.config.get_text_config(decoder=True)
    size, count = config.hidden_size, shape.num_heads
    weight = None
    if target_ids is not None:
        weight = torch.empty(1, len(target_ids), size, dtype=torch.float32, device="cpu")
        copy_rows(weight[0], target_rows(target, target_ids))
    elif not shape.shared_lm_head:
        weight = torch.empty(count, config.vocab_size, size, dtype=torch.float32, device="cpu")
        copy_rows(weight[0], target_rows(target))
        weight[1:] = weight[0]
    blocks, biases = (
        torch.zeros(count, shape.num_layers, size, size, dtype=torch.float32, device="cpu"),
        torch.zeros(count, shape.num_layers, size, dtype=torch.float32, device="cpu"),
    )
    return MedusaHeads(blocks, biases, weight, target_ids).to(last_device(target))


def warm_medusa(folder: str | os.PathLike, target: GenerativeModel) -> tuple[MedusaHeads, Int[Tensor, " Vd"] | None]:
    """Published Medusa heads (folder or Hub id) whose training continues, and their draft vocabulary."""
    heads = MedusaDrafter.from_folder(local_folder(os.fspath(folder)), target).heads
    refuse_added_tokens(heads.vocab_size if heads.token_ids is None else None, target)
    return trainable(heads), heads.token_ids


class MedusaMethod(HeadMethod[Any, MedusaTrainingOptions]):
    """Trains Medusa heads on a frozen target. `new_medusa` and `warm_medusa` make them, with their draft vocabulary."""

    name = "medusa"
    head_class = MedusaShape
    options_class = MedusaTrainingOptions
    new_head = staticmethod(new_medusa)
    warm_head = staticmethod(warm_medusa)

    def __init__(
        self,
        head: MedusaHeads,
        target: GenerativeModel,
        target_ids: Int[Tensor, " Vd"] | None = None,
        options: MedusaTrainingOptions | None = None,
    ):
        super().__init__(head, target, head.token_ids, options)  # heads know their draft vocabulary themselves
        self.feature_layers = (target.config.get_text_config(decoder=True).num_hidden_layers,)

    @classmethod
    def suggested(cls, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        """The target's distribution as the teacher: it is right whoever wrote the text."""
        return {"options": {"soft": True}}

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        """The loss of the heads."""
        entries = Entries.of(batch, self.head.num_heads, self.head.device)
        hidden = states.last_hidden.to(self.head.device, self.head.dtype)
        head_states = self.head.states(hidden.flatten(0, 1)).unflatten(1, hidden.shape[:2])
        teacher_hidden = states.last_hidden.to(self.head.device)[entries.teacher_positions]
        best = self.teacher.to_draft(self.teacher.argmax(teacher_hidden))[entries.teacher_row]
        wanted = best if self.options.soft else self.teacher.to_draft(entries.label)
        learnt = wanted >= 0  # a draft vocabulary cannot learn the tokens that it lacks
        losses = self._losses(entries, learnt, head_states, teacher_hidden)
        each = torch.cat([part.each for part in losses])
        hits = torch.cat([part.best for part in losses]) == best
        return StepOutput(torch.stack([part.loss for part in losses]).sum(), entries.metrics(each, hits, learnt))

    def drafter(self, target: GenerativeModel, **options: Any) -> MedusaDrafter:
        """A drafter with the present weights; options are those of `MedusaOptions`."""
        return MedusaDrafter(detached_copy(self.head, target.dtype), target, MedusaOptions(**options))

    def _losses(
        self,
        entries: Entries,
        learnt: Bool[Tensor, " E"],
        head_states: Float[Tensor, "D B S H"],
        teacher_hidden: Float[Tensor, "T H"],
    ) -> list[EntryLosses]:
        """One loss for all heads if they share an output matrix, else one for each head."""
        weights, weight = entries.weights(self.options.head_decay) * learnt, self.head.output_weight
        if weight is None or weight.shape[0] == 1:
            rows = entries.gather(list(head_states))
            output = self._target_output() if weight is None else weight[0]
            return [cross_entropy(rows, output, self._targets(entries, teacher_hidden), weights)]
        losses = []
        for head, states in enumerate(head_states):
            mine = entries.step == head
            rows, targets = states[entries.counted[head]], self._targets(entries.only(mine), teacher_hidden)
            losses.append(cross_entropy(rows, weight[head], targets, weights[mine]))
        return losses

    def _targets(self, entries: Entries, teacher_hidden: Float[Tensor, "T H"]) -> Targets:
        if self.options.soft:
            return SoftTargets(self.teacher.read(teacher_hidden), entries.teacher_row)
        return HardTargets(self.teacher.to_draft(entries.label).clamp(min=0))

    def _target_output(self) -> Tensor | nn.Module:
        """The target's output matrix, or its module if that is not a plain matrix. Neither is trained."""
        lm_head = self.teacher.lm_head
        return lm_head.weight.detach().to(self.head.device) if is_dense(lm_head) else lm_head
