"""Training of Medusa heads on a frozen target (Medusa-1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from hf_speculate.speculator import unwrap
from hf_speculate_plugins.medusa import MedusaHeads

from ...data import Batch
from ...states import TargetStates
from ..contract import CountTokens, StepOutput
from .base import BaseMedusaMethod
from .new_head import medusa_of_shape, warm_medusa
from .options import MedusaShape, MedusaTrainingOptions


if TYPE_CHECKING:
    from typing_extensions import Self


class MedusaMethod(BaseMedusaMethod):
    """Trains Medusa heads.

    Args:
        options: see `MedusaTrainingOptions`; the others are those of `BaseMedusaMethod`.
    """

    name = "medusa"
    options_class = MedusaTrainingOptions

    def __init__(self, heads: MedusaHeads, target: PreTrainedModel, options: MedusaTrainingOptions | None = None):
        super().__init__(heads, target, options or MedusaTrainingOptions())

    @classmethod
    def for_target(
        cls, target: nn.Module, head: MedusaShape, options: MedusaTrainingOptions, count_tokens: CountTokens
    ) -> Self:
        model = unwrap(target)
        return cls(medusa_of_shape(model, head, count_tokens), model, options)

    @classmethod
    def from_folder(cls, folder: str, target: nn.Module, options: MedusaTrainingOptions) -> Self:
        model = unwrap(target)
        return cls(warm_medusa(folder, model), model, options)

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        return self.heads_loss(batch, states)
