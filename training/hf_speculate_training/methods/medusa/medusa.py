"""Training of Medusa heads on a frozen target (Medusa-1)."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from ...data import Batch
from ...states import TargetStates
from ..contract import StepOutput
from .base import BaseMedusaMethod
from .options import MedusaTrainingOptions


class MedusaMethod(BaseMedusaMethod[MedusaTrainingOptions]):
    """Trains Medusa heads, see `BaseMedusaMethod` and `MedusaTrainingOptions`."""

    name = "medusa"
    options_class = MedusaTrainingOptions

    @classmethod
    def suggested(cls, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        """The target's distribution as the teacher: it serves whoever wrote the text."""
        return {"options": {"soft": True}}

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        return self.heads_loss(batch, states)
