"""Training of EAGLE-1 heads (EAGLE-2 drafts with the same ones).

Source: EAGLE (arXiv:2401.15077, section 4): the head learns the target's next feature by regression and, with a small
weight, the distribution that the target's output matrix makes of it. More unrolled `steps` than one train it on its own
features as well (arXiv:2408.15766, "HASS").
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Int
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from hf_speculate_plugins.eagle import EagleHead

from ...data.batches import Batch
from ...states.target_states import TargetStates
from ..contract import StepOutput
from ..entries import Entries
from .eagle3 import Eagle3Method


class Eagle1Method(Eagle3Method):
    """Trains an EAGLE-1 head.

    Args:
        feature_weight, token_weight: of the regression (smooth L1, mean over the hidden size) and of the cross-entropy.
        noise: the features' uniform noise; the reference takes 0.1 at 512 tokens.
        options: of `Eagle3Method`.

    Metrics, beside those of `Eagle3Method`: `regression`.
    """

    name = "eagle1"

    def __init__(
        self,
        head: EagleHead,
        target: PreTrainedModel,
        target_ids: Int[Tensor, " Vd"] | None = None,
        *,
        feature_weight: float = 1.0,
        token_weight: float = 0.1,
        steps: int = 1,
        noise: float = 0.1,
        **options: Any,
    ):
        super().__init__(head, target, target_ids, steps=steps, noise=noise, **options)
        self.feature_weight, self.token_weight = feature_weight, token_weight

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        entries = Entries.of(batch, self.steps, self.head.device)
        outputs = self.unroll(batch, states)
        entries, losses, best = self._compare(entries, outputs, states)
        # The feature of EAGLE-1 is the target's last hidden state, so the next one lies where the teacher reads.
        features = states.last_hidden.detach().to(self.head.device)[entries.teacher_positions]
        rows = entries.gather(outputs)
        distances = functional.smooth_l1_loss(rows.float(), features[entries.teacher_row].float(), reduction="none")
        regression = (distances.mean(-1) * entries.weights(self.step_decay, self.normalizer)).sum()
        loss = self.feature_weight * regression + self.token_weight * losses.loss
        metrics = entries.metrics(losses.each, losses.best == best)
        return StepOutput(loss, {**metrics, "regression": regression.detach()})
