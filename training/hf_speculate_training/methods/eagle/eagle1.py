"""Training of EAGLE-1 heads (EAGLE-2 drafts with the same ones).

Source: EAGLE (arXiv:2401.15077, section 4): the head learns the target's next feature by regression and, with a small
weight, the distribution that the target's output matrix makes of it. More unrolled `steps` than one train it on its own
features as well (arXiv:2408.15766, "HASS").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional

from hf_speculate.models import unwrap

from ...data import Batch
from ...states import TargetStates
from ..contract import CountTokens, StepOutput
from ..entries import Entries
from .base import BaseEagleMethod
from .new_head import new_eagle1
from .options import Eagle1TrainingOptions, EagleShape


if TYPE_CHECKING:
    from typing_extensions import Self


class Eagle1Method(BaseEagleMethod[Eagle1TrainingOptions]):
    """Trains an EAGLE-1 head, see `BaseEagleMethod` and `Eagle1TrainingOptions`.

    Metrics, beside those of `Eagle3Method`: `regression`.
    """

    name = "eagle1"
    head_class = EagleShape
    options_class = Eagle1TrainingOptions

    @classmethod
    def for_target(
        cls, target: nn.Module, head: EagleShape, options: Eagle1TrainingOptions, count_tokens: CountTokens
    ) -> Self:
        model = unwrap(target)
        return cls(new_eagle1(model, **head.given()), model, None, options)

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        entries = Entries.of(batch, self.options.steps, self.head.device)
        outputs = self.unroll(batch, states)
        entries, losses, best = self.compare(entries, outputs, states)
        # The feature of EAGLE-1 is the target's last hidden state, so the next one lies where the teacher reads.
        features = states.last_hidden.detach().to(self.head.device)[entries.teacher_positions]
        rows = entries.gather(outputs)
        distances = functional.smooth_l1_loss(rows.float(), features[entries.teacher_row].float(), reduction="none")
        regression = (distances.mean(-1) * entries.weights(self.options.step_decay, self.options.normalizer)).sum()
        loss = self.options.feature_weight * regression + self.options.token_weight * losses.loss
        metrics = entries.metrics(losses.each, losses.best == best)
        return StepOutput(loss, {**metrics, "regression": regression.detach()})
