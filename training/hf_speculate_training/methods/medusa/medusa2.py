"""Training of Medusa heads together with the target (Medusa-2), by an adapter that changes the target's text little.

Source: Cai et al., "Medusa" (arXiv:2401.10774, sections 2.2.2 and 2.3.2). Stage one trains the heads alone. In stage
two the adapter learns as well:

    loss = distillation + w(step) * heads,    w rises from 0 to `head_weight`

where distillation is the cross-entropy against the target with its adapter switched off, so that the target keeps its
own distribution while its states become easier to read ahead from. The heads then belong to the adapted target.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_speculate.drafting import SavedHead
from hf_speculate.errors import TargetMismatchError
from hf_speculate.hub import ADAPTER_FOLDER
from hf_speculate.models import unwrap
from hf_speculate_plugins.medusa import MedusaHeads

from ...data import NO_DOCUMENT, Batch
from ...sections import RecipeError, field_names, refuse_unknown
from ...states import TargetReader, TargetStates
from ..contract import StepOutput
from ..entries import emitting_positions
from ..losses import EntryLosses, SoftTargets, lean_cross_entropy, plain_cross_entropy
from ..processes import shared_size
from ..teacher import Teacher
from .base import BaseMedusaMethod
from .options import Medusa2TrainingOptions


if TYPE_CHECKING:
    from peft import PeftModel


class Medusa2Method(BaseMedusaMethod[Medusa2TrainingOptions]):
    """Trains Medusa heads and an adapter of the target.

    The adapter's parameters are registered here, so that optimizer and checkpoints see them; the target's are not.

    Args:
        heads: the heads, with parameters in float32.
        target: a PEFT model with one active adapter that can be switched off (LoRA and its kin), as
            `peft.get_peft_model` makes it.
        options: see `Medusa2TrainingOptions`.
    Raises:
        TargetMismatchError: a target without an adapter, or with one that is not trainable.

    Metrics, beside those of the heads: `distillation`, the cross-entropy against the original target, and `agreement`,
    how often both prefer the same token.
    """

    name = "medusa2"
    options_class = Medusa2TrainingOptions
    trains_target = True

    def __init__(self, heads: MedusaHeads, target: nn.Module, options: Medusa2TrainingOptions | None = None):
        super().__init__(heads, target, options)
        if not hasattr(target, "disable_adapter"):
            raise TargetMismatchError(
                f"medusa2 trains an adapter of the target, but {type(target).__name__} has none. Pass "
                "peft.get_peft_model(target, LoraConfig(...)), or use the method medusa."
            )
        trained = {name: p for name, p in target.named_parameters() if p.requires_grad}
        if not trained:
            raise TargetMismatchError(
                "medusa2 found nothing to train in the target: load the adapter with is_trainable=True."
            )
        # Parameters themselves, not copies; names of parameters may not have dots.
        self.adapter = nn.ParameterDict({name.replace(".", "/"): p for name, p in trained.items()})
        self._heads_only = self.options.heads_share > 0
        self._weight = 0.0 if self.options.warmup_share > 0 else self.options.head_weight
        self._target: tuple[PeftModel] = (cast("PeftModel", target),)  # in a tuple: a module would be registered
        self._original = TargetReader(unwrap(target), self.feature_layers)
        self._whole_teacher = Teacher(self.teacher.lm_head, None, self.teacher.vocab_size)

    @classmethod
    def suggested(cls, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        """The LoRA of Medusa's own recipe, on every projection."""
        return {"adapter": {"r": 32, "lora_alpha": 16, "target_modules": "all-linear"}}

    @classmethod
    def adapted(cls, target: nn.Module, adapter: Mapping[str, Any]) -> nn.Module:
        """The target with a fresh LoRA.

        Args:
            adapter: fields of `peft.LoraConfig`.
        """
        from peft import LoraConfig, get_peft_model

        if not adapter:
            raise RecipeError(
                f"{cls.name} trains an adapter of the target: give method.adapter, e.g. {{r: 16, lora_alpha: 32}}."
            )
        refuse_unknown(adapter, field_names(LoraConfig), "method.adapter")
        return get_peft_model(cast(PreTrainedModel, target), LoraConfig(task_type="CAUSAL_LM", **adapter))

    def on_step(self, step: int, num_steps: int) -> None:
        share, stages = step / max(num_steps, 1), self.options
        self._heads_only = share < stages.heads_share
        rise = (share - stages.heads_share) / stages.warmup_share if stages.warmup_share > 0 else 1.0
        self._weight = stages.head_weight * min(max(rise, 0.0), 1.0)

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        if self._heads_only:
            detached = TargetStates(states.features, states.last_hidden.detach())
            output = self.heads_loss(batch, detached)
            # Every parameter gets a gradient, also those that rest: DDP waits for all.
            return StepOutput(output.loss + sum(p.sum() * 0 for p in self.adapter.values()), output.metrics)
        if self.training and not states.last_hidden.requires_grad:
            raise TargetMismatchError(
                "medusa2 trains the target: its states must come with a graph, not from a feature cache."
            )
        output = self.heads_loss(batch, states)
        original = self._original_hidden(batch).to(states.last_hidden.device)
        distillation, agreement = self._distillation(states.last_hidden, original, batch)
        loss = distillation.to(output.loss.device) + self._weight * output.loss
        metrics = {"distillation": distillation.detach(), "agreement": agreement}
        return StepOutput(loss, {**output.metrics, **metrics})

    def save(self, folder: str | os.PathLike, target: PreTrainedModel, layout: str | None = None) -> SavedHead:
        """Writes the heads, and the adapter that they belong to into `ADAPTER_FOLDER`."""
        saved = super().save(folder, target, layout)
        self.save_target(Path(folder) / ADAPTER_FOLDER)
        return saved

    def save_target(self, path: str | os.PathLike, *, merged: bool = False) -> None:
        """Writes the adapter, or the target with the adapter merged into its weights; the target stays as it is.

        The heads are saved by `drafter(target).save_pretrained(...)`; on the original target they draft badly.
        """
        (target,) = self._target
        if not merged:
            target.save_pretrained(os.fspath(path))
            return
        target.merge_adapter()
        try:
            state = unwrap(target).state_dict()
            names = {name: name.replace(".base_layer.", ".") for name in state if ".lora_" not in name}
            unwrap(target).save_pretrained(path, state_dict={new: state[old] for old, new in names.items()})
        finally:
            target.unmerge_adapter()

    @torch.no_grad()
    def _original_hidden(self, batch: Batch) -> Float[Tensor, "B S H"]:
        (target,) = self._target
        with target.disable_adapter():
            return self._original(batch).last_hidden

    def _distillation(
        self, hidden: Float[Tensor, "B S H"], original: Float[Tensor, "B S H"], batch: Batch
    ) -> tuple[Tensor, Tensor]:
        kept = emitting_positions(batch).to(hidden.device)
        rows, wanted = hidden[kept], original[kept]
        index = torch.arange(len(rows), device=rows.device)
        targets = SoftTargets(self._whole_teacher.read(wanted), index)
        divided = batch["document_ids"] != NO_DOCUMENT if self.options.normalizer == "all" else kept
        size = shared_size(divided.sum().float().to(rows.device))
        weights = (1 / size).expand(len(rows))
        losses = self._against_original(rows, targets, weights)
        agrees = losses.best == self._whole_teacher.argmax(wanted)
        return losses.loss, agrees.float().sum() / max(len(rows), 1)

    def _against_original(self, rows: Tensor, targets: SoftTargets, weights: Tensor) -> EntryLosses:
        lm_head = self._whole_teacher.lm_head
        if self.options.lean and self._whole_teacher.is_dense:
            return lean_cross_entropy(rows, lm_head.weight.to(rows.device), targets, weights)
        return plain_cross_entropy(rows, lm_head, targets, weights)
