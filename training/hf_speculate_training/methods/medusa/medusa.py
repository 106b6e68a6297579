"""Training of Medusa heads on a frozen target (Medusa-1)."""

from __future__ import annotations

from ...data import Batch
from ...states import TargetStates
from ..contract import StepOutput
from .base import BaseMedusaMethod
from .options import MedusaTrainingOptions


class MedusaMethod(BaseMedusaMethod[MedusaTrainingOptions]):
    """Trains Medusa heads, see `BaseMedusaMethod` and `MedusaTrainingOptions`."""

    name = "medusa"
    options_class = MedusaTrainingOptions

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        return self.heads_loss(batch, states)
