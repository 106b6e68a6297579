"""Training of EAGLE-3 heads, against the target's distribution alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PretrainedConfig

from hf_speculate.models import unwrap

from ...data import Batch
from ...states import TargetStates
from ..contract import SMALL_HIDDEN_SIZE, CountTokens, StepOutput
from ..entries import Entries
from ..vocabulary import DRAFT_VOCAB_SIZE, choose_vocabulary, suggested_vocabulary
from .base import BaseEagleMethod
from .new_head import new_eagle3
from .options import Eagle3Shape, Eagle3TrainingOptions


if TYPE_CHECKING:
    from typing_extensions import Self


class Eagle3Method(BaseEagleMethod[Eagle3TrainingOptions]):
    """Trains an EAGLE-3 head, see `BaseEagleMethod` and `Eagle3TrainingOptions`."""

    name = "eagle3"
    head_class = Eagle3Shape
    options_class = Eagle3TrainingOptions

    @classmethod
    def suggested(cls, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        """A draft vocabulary for large vocabularies; fewer unrolled steps where the head is small."""
        size = suggested_vocabulary(config)
        options = {"steps": 5} if config.hidden_size < SMALL_HIDDEN_SIZE else {}
        return {"head": {} if size is None else {DRAFT_VOCAB_SIZE: size}, "options": options}

    @classmethod
    def for_target(
        cls, target: nn.Module, head: Eagle3Shape, options: Eagle3TrainingOptions, count_tokens: CountTokens
    ) -> Self:
        model = unwrap(target)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        target_ids = choose_vocabulary(head.draft_vocab_size, vocab_size, count_tokens)
        return cls(new_eagle3(model, target_ids, **head.given(DRAFT_VOCAB_SIZE)), model, target_ids, options)

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        entries = Entries.of(batch, self.options.steps, self.head.device)
        outputs = self.unroll(batch, states)
        entries, losses, best = self.compare(entries, outputs, states)
        return StepOutput(losses.loss, entries.metrics(losses.each, losses.best == best))
