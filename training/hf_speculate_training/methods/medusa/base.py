"""The loss of Medusa heads.

Source: Cai et al., "Medusa" (arXiv:2401.10774, section 2.2.1). Head h on the state at token t predicts token t + 2 + h
of the text, and its loss has weight 0.8**h. Where a text was not written by the target, the target's own distribution
at token t + 1 + h is the better teacher (`soft`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_speculate.models import unwrap
from hf_speculate.target import is_dense
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads, MedusaOptions

from ...data import Batch
from ...states import TargetStates
from ..contract import CountTokens, StepOutput, TrainingMethod
from ..entries import Entries
from ..losses import EntryLosses, HardTargets, SoftTargets, Targets, lean_cross_entropy, plain_cross_entropy
from ..teacher import Teacher
from ..vocabulary import choose_vocabulary
from ..weights import detached_copy
from .new_head import new_medusa, warm_medusa
from .options import MedusaShape, MedusaTrainingOptions


if TYPE_CHECKING:
    from typing_extensions import Self


Options = TypeVar("Options", bound=MedusaTrainingOptions)


class BaseMedusaMethod(TrainingMethod, Generic[Options]):
    """What both ways to train Medusa heads share.

    Args:
        heads: the heads, with parameters in float32; see `new_medusa` for fresh ones and `warm_medusa` for others.
        target: only its output layer is kept, and not as a submodule.
        options: of `options_class`; None: its defaults.
    """

    head_class = MedusaShape

    def __init__(self, heads: MedusaHeads, target: nn.Module, options: Options | None = None):
        super().__init__()
        model = unwrap(target)
        config = model.config.get_text_config(decoder=True)
        self.heads = heads
        self.options: Options = self.options_class() if options is None else options
        self.teacher = Teacher(model.get_output_embeddings(), heads.token_ids, config.vocab_size)
        self.feature_layers = (config.num_hidden_layers,)

    @classmethod
    def for_target(cls, target: nn.Module, head: MedusaShape, options: Options, count_tokens: CountTokens) -> Self:
        model = unwrap(target)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        target_ids = choose_vocabulary(head.draft_vocab_size, vocab_size, count_tokens)
        heads = new_medusa(
            model, head.num_heads, head.num_layers, shared_lm_head=head.shared_lm_head, target_ids=target_ids
        )
        return cls(heads, target, options)

    @classmethod
    def from_folder(cls, folder: str, target: nn.Module, options: Options) -> Self:
        return cls(warm_medusa(folder, unwrap(target)), target, options)

    @property
    def draft_vocabulary(self) -> Int[Tensor, " Vd"] | None:
        return self.heads.token_ids

    def heads_loss(self, batch: Batch, states: TargetStates) -> StepOutput:
        """The loss of the heads, with a graph into the states where those have one."""
        entries = Entries.of(batch, self.heads.num_heads, self.heads.device)
        hidden = states.last_hidden.to(self.heads.device, self.heads.dtype)
        head_states = self.heads.states(hidden.flatten(0, 1)).unflatten(1, hidden.shape[:2])
        loss, metrics = self._compare(entries, head_states, states.last_hidden.detach())
        return StepOutput(loss, metrics)

    def drafter(self, target: PreTrainedModel, **options: Any) -> MedusaDrafter:
        """Options are those of `MedusaOptions`."""
        return MedusaDrafter(detached_copy(self.heads, target.dtype), target, MedusaOptions(**options))

    def _compare(
        self, entries: Entries, head_states: Float[Tensor, "D B S H"], last_hidden: Float[Tensor, "B S H"]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        last_hidden = last_hidden.to(self.heads.device)
        teacher_hidden = last_hidden[entries.teacher_positions]
        best = self.teacher.to_draft(self.teacher.argmax(teacher_hidden))
        wanted = best[entries.teacher_row] if self.options.soft else self.teacher.to_draft(entries.label)
        learnt = wanted >= 0  # what a truncated vocabulary does not have cannot be learnt
        losses = self._losses(entries, learnt, head_states, teacher_hidden)
        each = torch.cat([part.each for part in losses])
        hits = torch.cat([part.best for part in losses]) == best[entries.teacher_row]
        return torch.stack([part.loss for part in losses]).sum(), entries.metrics(each, hits, learnt)

    def _losses(
        self, entries: Entries, learnt: Bool[Tensor, " E"], head_states: Tensor, teacher_hidden: Tensor
    ) -> list[EntryLosses]:
        """One for all heads where they share an output matrix, else one for each."""
        weights = entries.weights(self.options.head_decay, self.options.normalizer) * learnt
        weight = self.heads.output_weight
        if weight is None or weight.shape[0] == 1:
            rows = entries.gather(list(head_states))
            output = self._target_output() if weight is None else weight[0]
            return [self._cross_entropy(rows, output, self._targets(entries, teacher_hidden), weights)]
        losses = []
        for head, states in enumerate(head_states):
            part = entries.only(entries.step == head)
            rows, mine = states[entries.counted[head]], weights[entries.step == head]
            losses.append(self._cross_entropy(rows, weight[head], self._targets(part, teacher_hidden), mine))
        return losses

    def _targets(self, entries: Entries, teacher_hidden: Tensor) -> Targets:
        if self.options.soft:
            return SoftTargets(self.teacher.read(teacher_hidden), entries.teacher_row)
        return HardTargets(self.teacher.to_draft(entries.label).clamp(min=0))

    def _target_output(self) -> Tensor | nn.Module:
        """The target's output matrix, or its module where that is no plain matrix. Neither is trained."""
        lm_head = self.teacher.lm_head
        return lm_head.weight.detach().to(self.heads.device) if is_dense(lm_head) else lm_head

    def _cross_entropy(
        self, rows: Tensor, output: Tensor | nn.Module, targets: Targets, weights: Tensor
    ) -> EntryLosses:
        if self.options.lean and isinstance(output, Tensor):
            return lean_cross_entropy(rows, output, targets, weights)
        return plain_cross_entropy(rows, output, targets, weights)
