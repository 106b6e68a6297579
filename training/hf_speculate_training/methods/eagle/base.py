"""Training of EAGLE heads: drafting is unrolled, so that a head learns from its own states as it will have them.

Source: EAGLE-3 (arXiv:2503.01840, section 3.2, "training-time test"). Entry i of step k takes the state that step k - 1
gave at i (step 0: the target's fused features), the embedding of token i + 1 + k and RoPE position i + k, and predicts
the target's distribution at token i + 1 + k. Tokens are those of the text, never the head's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_speculate.models import unwrap
from hf_speculate.target import is_dense
from hf_speculate_plugins.eagle import EagleDrafter, EagleHead, EagleOptions

from ...data import Batch
from ...states import TargetStates
from ..entries import Entries, tokens_ahead
from ..head_method import HeadMethod
from ..losses import EntryLosses, SoftTargets, lean_cross_entropy, plain_cross_entropy
from .new_head import warm_eagle
from .options import EagleTrainingOptions
from .unrolled import StepMemory, UnrolledAttention, step_masks


if TYPE_CHECKING:
    from typing_extensions import Self


Options = TypeVar("Options", bound=EagleTrainingOptions)


class BaseEagleMethod(HeadMethod[EagleHead, Options]):
    """What the training of all EAGLE heads shares.

    Args:
        head: the head, with parameters in float32; see `new_eagle3`, `new_eagle1` for fresh ones and `warm_eagle`.
        target: whose states it reads; only its output layer is kept, and not as a submodule.
        target_ids: int64 [Vd], target id of each draft id, ascending; None where they are the same.
        options: of `options_class`; None: its defaults.
    """

    def __init__(
        self,
        head: EagleHead,
        target: PreTrainedModel,
        target_ids: Int[Tensor, " Vd"] | None = None,
        options: Options | None = None,
    ):
        super().__init__(head, target, target_ids, options)
        config = target.config.get_text_config(decoder=True)
        self.entry_layers = head.spec.entry_layers(config.num_hidden_layers)
        self.feature_layers = tuple(dict.fromkeys(self.entry_layers))

    @classmethod
    def from_folder(cls, folder: str, target: nn.Module, options: Options) -> Self:
        model = unwrap(target)
        head, target_ids = warm_eagle(folder, model)
        return cls(head, model, target_ids, options)

    def unroll(self, batch: Batch, states: TargetStates) -> list[Float[Tensor, "B S Hd"]]:
        """What the output matrix takes, at every token, for each unrolled step."""
        device = self.head.device
        input_ids, documents = batch["input_ids"].to(device), batch["document_ids"].to(device)
        positions, windows = batch["position_ids"].to(device), self.head.spec.windows
        state = self.head.fuse([self._noisy(states.features[layer]) for layer in self.entry_layers])
        memory: list[StepMemory] = []
        outputs = []
        masks = step_masks(documents, positions, windows, 0)
        for step in range(self.options.steps):
            if step and any(windows):
                masks = step_masks(documents, positions, windows, step)
            attend_args = (masks, windows, tuple(memory))
            step_args = (tokens_ahead(input_ids, step + 1), state, positions + step, attend_args)
            if self.options.checkpoint_steps and torch.is_grad_enabled():
                hidden, added = checkpoint(self._run_step, *step_args, use_reentrant=False)  # type: ignore[misc]
            else:
                hidden, added = self._run_step(*step_args)
            memory.append(added)
            output, state = self.head.finish(hidden)
            outputs.append(output)
        return outputs

    def drafter(self, target: PreTrainedModel, **options: Any) -> EagleDrafter:
        """Options are those of `EagleOptions`."""
        return EagleDrafter(self.decoding_head(target), target, EagleOptions(**options))

    def _run_step(self, token_ids, state, position_ids, attend_args) -> tuple[Tensor, StepMemory]:
        attend = UnrolledAttention(*attend_args)
        hidden = self.head(token_ids, state, position_ids, attend)
        return hidden, attend.added

    def compare(
        self, entries: Entries, outputs: list[Tensor], states: TargetStates
    ) -> tuple[Entries, EntryLosses, Int[Tensor, " E"]]:
        """The loss against the teacher, the entries that are in it, and the draft column that is right for each."""
        last_hidden = states.last_hidden.detach().to(self.head.device)
        teacher_hidden = last_hidden[entries.teacher_positions]
        best = self.teacher.to_draft(self.teacher.argmax(teacher_hidden))
        if not self.options.keep_unknown and self.target_ids is not None:
            entries = entries.only(best[entries.teacher_row] >= 0)
        targets = SoftTargets(self.teacher.read(teacher_hidden), entries.teacher_row)
        weights = entries.weights(self.options.step_decay, self.options.normalizer)
        losses = self._cross_entropy(entries.gather(outputs), targets, weights)
        return entries, losses, best[entries.teacher_row]

    def _cross_entropy(self, rows: Tensor, targets: SoftTargets, weights: Tensor) -> EntryLosses:
        output = self.head.output
        if not is_dense(output):  # the target's own, quantised: it can only be called
            return plain_cross_entropy(rows, output, targets, weights)
        weight = output.weight.to(rows.device)
        if self.options.lean:
            return lean_cross_entropy(rows, weight, targets, weights)
        return plain_cross_entropy(rows, weight, targets, weights)

    def _noisy(self, feature: Tensor) -> Tensor:
        noise = self.options.noise
        if not (self.training and noise):
            return feature
        return feature + torch.empty_like(feature).uniform_(-noise, noise)

    def _placed_ids(self) -> Tensor | None:
        return None if self.target_ids is None else self.target_ids.to(self.head.device)
