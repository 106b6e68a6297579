"""Training of EAGLE heads: drafting is unrolled, so that a head learns from its own states as it will have them.

Source: EAGLE-3 (arXiv:2503.01840, section 3.2, "training-time test"). Entry i of step k takes the state that step k - 1
gave at i (step 0: the target's fused features), the embedding of token i + 1 + k and RoPE position i + k. It predicts
the target's distribution at token i + 1 + k. Tokens are those of the text, never the head's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import smooth_l1_loss
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from hf_speculate.target import GenerativeModel
from hf_speculate_plugins.eagle import EagleDrafter, EagleHead, EagleOptions
from hf_speculate_plugins.heads import FeedingHead

from ...data import Batch
from ...states import TargetStates
from ..contract import SMALL_HIDDEN_SIZE, StepOutput
from ..entries import Entries, tokens_ahead
from ..heads import HeadMethod
from ..losses import EntryLosses, SoftTargets, cross_entropy
from .heads import Eagle3Shape, EagleShape, new_eagle1, new_eagle3, warm_eagle
from .unrolled import StepMemory, UnrolledAttention, step_masks


@dataclass(frozen=True, kw_only=True)
class EagleTrainingOptions:
    """Options for training an EAGLE head.

    Attributes:
        steps: number K of unrolled steps, the depth of drafts that the head learns to make.
        step_decay: base of the losses' weights; step k has `step_decay**k`.
        noise: bound of the uniform noise that is added to features in training, from [-noise, noise].
        checkpoint_steps: True computes each step again in the backward instead of keeping its activations.
    """

    steps: int
    step_decay: float = 0.8
    noise: float = 0.0
    checkpoint_steps: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}.")


@dataclass(frozen=True, kw_only=True)
class Eagle3TrainingOptions(EagleTrainingOptions):
    """Options for training an EAGLE-3 head, see `EagleTrainingOptions`."""

    steps: int = 7


@dataclass(frozen=True, kw_only=True)
class Eagle1TrainingOptions(EagleTrainingOptions):
    """Options for training an EAGLE-1 head, in addition to those of `EagleTrainingOptions`.

    Attributes:
        noise: bound of the features' uniform noise; the reference takes 0.1 at 512 tokens.
        feature_weight, token_weight: weights of the regression (smooth L1, mean over the hidden size) and of the
            cross-entropy.
    """

    steps: int = 1
    noise: float = 0.1
    feature_weight: float = 1.0
    token_weight: float = 0.1


MethodOptions = TypeVar("MethodOptions", bound=EagleTrainingOptions)


class UnrolledMethod(HeadMethod[Any, MethodOptions]):
    """Unrolling, and the loss against the target's distribution, for any `FeedingHead`. Arguments: `HeadMethod`'s."""

    def __init__(self, head: FeedingHead[Any], target: GenerativeModel, *args: Any, **kwargs: Any):
        super().__init__(head, target, *args, **kwargs)
        config = target.config.get_text_config(decoder=True)
        self.entry_layers = head.spec.entry_layers(config.num_hidden_layers)
        self.feature_layers = tuple(dict.fromkeys(self.entry_layers))

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        entries = Entries.of(batch, self.options.steps, self.head.device)
        outputs = self.unroll(batch, states)
        entries, losses, best = self.compare(entries, outputs, states)
        return StepOutput(losses.loss, entries.metrics(losses.each, losses.best == best))

    def unroll(self, batch: Batch, states: TargetStates) -> list[Float[Tensor, "B S Hd"]]:
        """Inputs of the output matrix at every token, for each unrolled step."""
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

    def _run_step(self, token_ids, state, position_ids, attend_args) -> tuple[Tensor, StepMemory]:
        attend = UnrolledAttention(*attend_args)
        hidden = self.head(token_ids, state, position_ids, attend)
        return hidden, attend.added

    def compare(
        self, entries: Entries, outputs: list[Tensor], states: TargetStates
    ) -> tuple[Entries, EntryLosses, Int[Tensor, " E"]]:
        """The entries that are in the loss, their losses against the teacher, and the right draft column of each.

        Entries whose best token is outside the draft vocabulary are left out: no draft can be right there.
        """
        last_hidden = states.last_hidden.detach().to(self.head.device)
        teacher_hidden = last_hidden[entries.teacher_positions]
        best = self.teacher.to_draft(self.teacher.argmax(teacher_hidden))
        if self.target_ids is not None:
            entries = entries.only(best[entries.teacher_row] >= 0)
        targets = SoftTargets(self.teacher.read(teacher_hidden), entries.teacher_row)
        weights = entries.weights(self.options.step_decay)
        losses = cross_entropy(entries.gather(outputs), self.head.output, targets, weights)
        return entries, losses, best[entries.teacher_row]

    def _noisy(self, feature: Tensor) -> Tensor:
        noise = self.options.noise
        if not (self.training and noise):
            return feature
        return feature + torch.empty_like(feature).uniform_(-noise, noise)


class EagleMethod(UnrolledMethod[MethodOptions]):
    """The common part of both methods; `new_eagle3`, `new_eagle1` and `warm_eagle` make its heads."""

    warm_head = staticmethod(warm_eagle)

    def drafter(self, target: GenerativeModel, **options: Any) -> EagleDrafter:
        """A drafter with the present weights; options are those of `EagleOptions`."""
        return EagleDrafter(self.decoding_head(target), target, EagleOptions(**options))


class Eagle3Method(EagleMethod[Eagle3TrainingOptions]):
    """Trains an EAGLE-3 head against the target's distribution alone, see `Eagle3TrainingOptions`."""

    name = "eagle3"
    head_class = Eagle3Shape
    options_class = Eagle3TrainingOptions

    @staticmethod
    def new_head(target: GenerativeModel, shape: Eagle3Shape, target_ids: Int[Tensor, " Vd"] | None) -> EagleHead:
        return new_eagle3(target, shape, target_ids)

    @classmethod
    def suggested(cls, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        """A draft vocabulary for large vocabularies, and fewer unrolled steps for small heads."""
        return {**super().suggested(config), "options": {"steps": 5} if config.hidden_size < SMALL_HIDDEN_SIZE else {}}


class Eagle1Method(EagleMethod[Eagle1TrainingOptions]):
    """Trains an EAGLE-1 head, which EAGLE-2 drafts with as well; see `Eagle1TrainingOptions`.

    Source: EAGLE (arXiv:2401.15077, section 4). The head learns the target's next feature by regression and, with a
    small weight, the distribution that the target's output matrix makes of it. More `steps` than one train it on its
    own features as well (arXiv:2408.15766, "HASS").

    Metrics, in addition to those of `Eagle3Method`: `regression`.
    """

    name = "eagle1"
    head_class = EagleShape
    options_class = Eagle1TrainingOptions

    @staticmethod
    def new_head(target: GenerativeModel, shape: EagleShape, target_ids: Int[Tensor, " Vd"] | None) -> EagleHead:
        return new_eagle1(target, shape)

    @classmethod
    def suggested(cls, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        """Nothing: the head has the target's vocabulary."""
        return {}

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        entries = Entries.of(batch, self.options.steps, self.head.device)
        outputs = self.unroll(batch, states)
        entries, losses, best = self.compare(entries, outputs, states)
        # The feature of EAGLE-1 is the target's last hidden state, so the next one lies where the teacher reads.
        features = states.last_hidden.detach().to(self.head.device)[entries.teacher_positions]
        rows = entries.gather(outputs)
        distances = smooth_l1_loss(rows.float(), features[entries.teacher_row].float(), reduction="none")
        regression = (distances.mean(-1) * entries.weights(self.options.step_decay)).sum()
        loss = self.options.feature_weight * regression + self.options.token_weight * losses.loss
        metrics = entries.metrics(losses.each, losses.best == best)
        return StepOutput(loss, {**metrics, "regression": regression.detach()})
