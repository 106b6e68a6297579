"""Training of EAGLE-3 heads: drafting is unrolled, so that a head learns from its own states as it will have them.

Source: EAGLE-3 (arXiv:2503.01840, section 3.2, "training-time test"). Entry i of step k takes the state that step k - 1
gave at i (step 0: the target's fused features), the embedding of token i + 1 + k and RoPE position i + k, and predicts
the target's distribution at token i + 1 + k. Tokens are those of the text, never the head's own.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_speculate.vocabulary import is_dense
from hf_speculate_plugins.checkpoints import LoadReport
from hf_speculate_plugins.eagle import EagleDrafter, EagleHead, EagleOptions, LoadedHead

from ...data.batches import Batch
from ...states.target_states import TargetStates
from ..contract import HeadMethod, StepOutput, detached_copy
from ..entries import Entries, Normalizer, tokens_ahead
from ..losses import EntryLosses, SoftTargets, lean_cross_entropy, plain_cross_entropy
from ..teacher import Teacher
from .unrolled import StepMemory, UnrolledAttention, step_masks


class Eagle3Method(HeadMethod):
    """Trains an EAGLE-3 head.

    Args:
        head: the head, with parameters in float32; see `new_head` for fresh ones and warm starts.
        target: whose states it reads; only its output layer is kept, and not as a submodule.
        target_ids: int64 [Vd], target id of each draft id, ascending; None where they are the same.
        steps: unrolled steps K, that is how deep a draft the head learns to make.
        step_decay: the loss of step k has weight `step_decay**k`.
        normalizer: see `Entries.weights`.
        keep_unknown: also learn where the target's best token is outside the draft vocabulary (as `speculators`; the
            reference leaves these entries out, since no draft can be right there).
        noise: features get uniform noise from [-noise, noise] while training.
        lean: the loss that streams the vocabulary; False takes the plain reference.
        checkpoint_steps: recompute each step in the backward instead of keeping its activations.
    """

    name = "eagle3"

    def __init__(
        self,
        head: EagleHead,
        target: PreTrainedModel,
        target_ids: Int[Tensor, " Vd"] | None = None,
        *,
        steps: int = 7,
        step_decay: float = 0.8,
        normalizer: Normalizer = "all",
        keep_unknown: bool = False,
        noise: float = 0.0,
        lean: bool = True,
        checkpoint_steps: bool = False,
    ):
        super().__init__()
        if steps < 1:
            raise ValueError(f"eagle3: steps must be at least 1, got {steps}.")
        config = target.config.get_text_config(decoder=True)
        self.head = head
        self.steps, self.step_decay = steps, step_decay
        self.normalizer: Normalizer = normalizer
        self.keep_unknown, self.noise, self.lean = keep_unknown, noise, lean
        self.checkpoint_steps = checkpoint_steps
        self.target_ids = target_ids
        self.teacher = Teacher(target.get_output_embeddings(), target_ids, config.vocab_size)
        self.entry_layers = head.spec.entry_layers(config.num_hidden_layers)
        self.feature_layers = tuple(dict.fromkeys(self.entry_layers))

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        entries = Entries.of(batch, self.steps, self.head.device)
        outputs = self.unroll(batch, states)
        entries, losses, best = self._compare(entries, outputs, states)
        return StepOutput(losses.loss, entries.metrics(losses.each, losses.best == best))

    def unroll(self, batch: Batch, states: TargetStates) -> list[Float[Tensor, "B S Hd"]]:
        """What the output matrix takes, at every token, for each unrolled step."""
        device = self.head.device
        input_ids, documents = batch["input_ids"].to(device), batch["document_ids"].to(device)
        positions, windows = batch["position_ids"].to(device), self.head.spec.windows
        state = self.head.fuse([self._noisy(states.features[layer]) for layer in self.entry_layers])
        memory: list[StepMemory] = []
        outputs = []
        masks = step_masks(documents, positions, windows, 0)
        for step in range(self.steps):
            if step and any(windows):
                masks = step_masks(documents, positions, windows, step)
            attend_args = (masks, windows, tuple(memory))
            step_args = (tokens_ahead(input_ids, step + 1), state, positions + step, attend_args)
            if self.checkpoint_steps and torch.is_grad_enabled():
                hidden, added = checkpoint(self._run_step, *step_args, use_reentrant=False)  # type: ignore[misc]
            else:
                hidden, added = self._run_step(*step_args)
            memory.append(added)
            output, state = self.head.finish(hidden)
            outputs.append(output)
        return outputs

    def drafter(self, target: PreTrainedModel, **options: Any) -> EagleDrafter:
        """Options are those of `EagleOptions`."""
        report = LoadReport("the head in training")
        loaded = LoadedHead(detached_copy(self.head, target.dtype), self._placed_ids(), report)
        return EagleDrafter(loaded, target, EagleOptions(**options))

    def _run_step(self, token_ids, state, position_ids, attend_args) -> tuple[Tensor, StepMemory]:
        attend = UnrolledAttention(*attend_args)
        hidden = self.head(token_ids, state, position_ids, attend)
        return hidden, attend.added

    def _compare(
        self, entries: Entries, outputs: list[Tensor], states: TargetStates
    ) -> tuple[Entries, EntryLosses, Int[Tensor, " E"]]:
        """The loss against the teacher, the entries that are in it, and the draft column that is right for each."""
        last_hidden = states.last_hidden.detach().to(self.head.device)
        teacher_hidden = last_hidden[entries.teacher_positions]
        best = self.teacher.to_draft(self.teacher.argmax(teacher_hidden))
        if not self.keep_unknown and self.target_ids is not None:
            entries = entries.only(best[entries.teacher_row] >= 0)
        targets = SoftTargets(self.teacher.read(teacher_hidden), entries.teacher_row)
        weights = entries.weights(self.step_decay, self.normalizer)
        losses = self._cross_entropy(entries.gather(outputs), targets, weights)
        return entries, losses, best[entries.teacher_row]

    def _cross_entropy(self, rows: Tensor, targets: SoftTargets, weights: Tensor) -> EntryLosses:
        output = self.head.output
        if not is_dense(output):  # the target's own, quantised: it can only be called
            return plain_cross_entropy(rows, output, targets, weights)
        weight = output.weight.to(rows.device)
        if self.lean:
            return lean_cross_entropy(rows, weight, targets, weights)
        return plain_cross_entropy(rows, weight, targets, weights)

    def _noisy(self, feature: Tensor) -> Tensor:
        if not (self.training and self.noise):
            return feature
        return feature + torch.empty_like(feature).uniform_(-self.noise, self.noise)

    def _placed_ids(self) -> Tensor | None:
        return None if self.target_ids is None else self.target_ids.to(self.head.device)
