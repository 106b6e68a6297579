"""Training of Medusa heads, on a frozen target (Medusa-1) or together with an adapter of it (Medusa-2).

Source: Cai et al., "Medusa" (arXiv:2401.10774, sections 2.2.1, 2.2.2 and 2.3.2). Head h on the state at token t
predicts token t + 2 + h of the text, and its loss has weight 0.8**h. If the target did not write the text, its own
distribution at token t + 1 + h is the better teacher (`soft`).

Stage one of Medusa-2 trains the heads alone. In stage two the adapter learns as well:

    loss = distillation + w(step) * heads,    w rises from 0 to `head_weight`

where distillation is the cross-entropy against the target with its adapter switched off. The target so keeps its own
distribution while its states become easier to read ahead from. The heads then belong to the adapted target.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_speculate.drafting import SavedHead
from hf_speculate.errors import TargetMismatchError
from hf_speculate.hub import local_folder
from hf_speculate.models import GenerativeModel, unwrap
from hf_speculate.scoring import is_dense, last_device, output_layer
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads, MedusaOptions
from hf_speculate_tools.hub import ADAPTER_FOLDER

from ..data import NO_DOCUMENT, Batch
from ..sections import RecipeError, field_names, refuse_unknown
from ..states import TargetReader, TargetStates
from .contract import CountTokens, StepOutput, TrainingMethod
from .entries import Entries, emitting_positions, shared_size
from .heads import choose_vocabulary, copy_rows, detached_copy, refuse_added_tokens, target_rows, trainable
from .losses import EntryLosses, HardTargets, SoftTargets, Targets, Teacher, cross_entropy


if TYPE_CHECKING:
    from peft import PeftModel
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class MedusaShape:
    """The shape of fresh Medusa heads.

    Attributes:
        num_heads: number D of heads, and of tokens that are drafted ahead.
        num_layers: residual blocks of each head.
        shared_lm_head: True: all heads use the target's output matrix, which is not trained, and files are small.
            False: each has its own copy, as in the paper.
        draft_vocab_size: number of the most frequent tokens of the training data to draft with, through one matrix of
            the heads' own; None for the target's vocabulary.
    """

    num_heads: int = 4
    num_layers: int = 1
    shared_lm_head: bool = True
    draft_vocab_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class MedusaTrainingOptions:
    """Options for training Medusa heads.

    Attributes:
        head_decay: base of the losses' weights; head h has `head_decay**h`.
        soft: True learns the target's own distribution, False the text's token.
    """

    head_decay: float = 0.8
    soft: bool = False


@dataclass(frozen=True, kw_only=True)
class Medusa2TrainingOptions(MedusaTrainingOptions):
    """Options for training Medusa heads with an adapter of the target, in addition to those of `MedusaTrainingOptions`.

    Attributes:
        heads_share: share of all steps that train the heads alone.
        warmup_share: share of all steps over which the weight of the heads' loss rises after that.
        head_weight: weight of the heads' loss after the warm-up (the paper's lambda_0).
    """

    heads_share: float = 0.3
    warmup_share: float = 0.2
    head_weight: float = 0.2


MethodOptions = TypeVar("MethodOptions", bound=MedusaTrainingOptions)


def new_medusa(
    target: GenerativeModel,
    num_heads: int = 4,
    num_layers: int = 1,
    *,
    shared_lm_head: bool = True,
    target_ids: Int[Tensor, " Vd"] | None = None,
) -> MedusaHeads:
    """Fresh Medusa heads in float32, on the device of the target's last layer.

    Their blocks do nothing at first, so that each head predicts what the target does (paper, section 2.2).

    Args:
        target: the target.
        num_heads, num_layers, shared_lm_head: fields of `MedusaShape`.
        target_ids: tokens of a draft vocabulary. The heads then share one matrix of their own, the target's rows.
    """
    config = target.config.get_text_config(decoder=True)
    size = config.hidden_size
    weight = None
    if target_ids is not None:
        weight = torch.empty(1, len(target_ids), size)
        copy_rows(weight[0], target_rows(target, target_ids))
    elif not shared_lm_head:
        weight = torch.empty(num_heads, config.vocab_size, size)
        copy_rows(weight[0], target_rows(target))
        weight[1:] = weight[0]
    blocks, biases = torch.zeros(num_heads, num_layers, size, size), torch.zeros(num_heads, num_layers, size)
    return MedusaHeads(blocks, biases, weight, target_ids).to(last_device(target))


def warm_medusa(folder: str | os.PathLike, target: GenerativeModel) -> MedusaHeads:
    """Published Medusa heads (folder or Hub id) whose training continues."""
    heads = MedusaDrafter.from_folder(local_folder(os.fspath(folder)), target).heads
    refuse_added_tokens(heads.vocab_size if heads.token_ids is None else None, target)
    return trainable(heads)


class _Medusa(TrainingMethod, Generic[MethodOptions]):
    """The common part of both methods: the loss of the heads.

    Args:
        heads: heads with parameters in float32, from `new_medusa` or `warm_medusa`.
        target: the target; only its output layer is kept, and not as a submodule.
        options: an instance of `options_class`; None for its defaults.
    """

    head_class = MedusaShape

    def __init__(self, heads: MedusaHeads, target: nn.Module, options: MethodOptions | None = None):
        super().__init__()
        model = unwrap(target)
        config = model.config.get_text_config(decoder=True)
        self.heads = heads
        self.options: MethodOptions = self.options_class() if options is None else options
        self.teacher = Teacher(output_layer(model), heads.token_ids, config.vocab_size)
        self.feature_layers = (config.num_hidden_layers,)

    @classmethod
    def for_target(
        cls, target: nn.Module, head: MedusaShape, options: MethodOptions, count_tokens: CountTokens
    ) -> Self:
        model = unwrap(target)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        target_ids = choose_vocabulary(head.draft_vocab_size, vocab_size, count_tokens)
        shared = head.shared_lm_head
        heads = new_medusa(model, head.num_heads, head.num_layers, shared_lm_head=shared, target_ids=target_ids)
        return cls(heads, target, options)

    @classmethod
    def from_folder(cls, folder: str, target: nn.Module, options: MethodOptions) -> Self:
        return cls(warm_medusa(folder, unwrap(target)), target, options)

    @property
    def draft_vocabulary(self) -> Int[Tensor, " Vd"] | None:
        return self.heads.token_ids

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        """The loss of the heads, with a graph into the states if these have one."""
        entries = Entries.of(batch, self.heads.num_heads, self.heads.device)
        hidden = states.last_hidden.to(self.heads.device, self.heads.dtype)
        head_states = self.heads.states(hidden.flatten(0, 1)).unflatten(1, hidden.shape[:2])
        teacher_hidden = states.last_hidden.detach().to(self.heads.device)[entries.teacher_positions]
        best = self.teacher.to_draft(self.teacher.argmax(teacher_hidden))[entries.teacher_row]
        wanted = best if self.options.soft else self.teacher.to_draft(entries.label)
        learnt = wanted >= 0  # a draft vocabulary cannot learn the tokens that it lacks
        losses = self._losses(entries, learnt, head_states, teacher_hidden)
        each = torch.cat([part.each for part in losses])
        hits = torch.cat([part.best for part in losses]) == best
        return StepOutput(torch.stack([part.loss for part in losses]).sum(), entries.metrics(each, hits, learnt))

    def drafter(self, target: GenerativeModel, **options: Any) -> MedusaDrafter:
        """A drafter with the present weights; options are those of `MedusaOptions`."""
        return MedusaDrafter(detached_copy(self.heads, target.dtype), target, MedusaOptions(**options))

    def _losses(
        self,
        entries: Entries,
        learnt: Bool[Tensor, " E"],
        head_states: Float[Tensor, "D B S H"],
        teacher_hidden: Float[Tensor, "T H"],
    ) -> list[EntryLosses]:
        """One loss for all heads if they share an output matrix, else one for each head."""
        weights, weight = entries.weights(self.options.head_decay) * learnt, self.heads.output_weight
        if weight is None or weight.shape[0] == 1:
            rows = entries.gather(list(head_states))
            output = self._target_output() if weight is None else weight[0]
            return [cross_entropy(rows, output, self._targets(entries, teacher_hidden), weights)]
        losses = []
        for head, states in enumerate(head_states):
            mine = entries.step == head
            rows, targets = states[entries.counted[head]], self._targets(entries.only(mine), teacher_hidden)
            losses.append(cross_entropy(rows, weight[head], targets, weights[mine]))
        return losses

    def _targets(self, entries: Entries, teacher_hidden: Float[Tensor, "T H"]) -> Targets:
        if self.options.soft:
            return SoftTargets(self.teacher.read(teacher_hidden), entries.teacher_row)
        return HardTargets(self.teacher.to_draft(entries.label).clamp(min=0))

    def _target_output(self) -> Tensor | nn.Module:
        """The target's output matrix, or its module if that is not a plain matrix. Neither is trained."""
        lm_head = self.teacher.lm_head
        return lm_head.weight.detach().to(self.heads.device) if is_dense(lm_head) else lm_head


class MedusaMethod(_Medusa[MedusaTrainingOptions]):
    """Trains Medusa heads on a frozen target, see `MedusaTrainingOptions`."""

    name = "medusa"
    options_class = MedusaTrainingOptions

    @classmethod
    def suggested(cls, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        """The target's distribution as the teacher: it is right whoever wrote the text."""
        return {"options": {"soft": True}}


class Medusa2Method(_Medusa[Medusa2TrainingOptions]):
    """Trains Medusa heads and an adapter of the target.

    The adapter's parameters are registered here, so that optimizer and checkpoints see them; the target's are not.

    Args:
        heads: the heads, with parameters in float32.
        target: a PEFT model with one active adapter that can be switched off (LoRA and its kin), as
            `peft.get_peft_model` makes it.
        options: options of the training; None for the defaults.
    Raises:
        TargetMismatchError: the target has no adapter, or one that is not trainable.

    Metrics, in addition to those of the heads: `distillation`, the cross-entropy against the original target, and
    `agreement`, the share of tokens that both prefer.
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
        """The target with a fresh LoRA; `adapter` holds fields of `peft.LoraConfig`."""
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
        """The loss of the stage: of the heads alone, or of heads and adapter."""
        if self._heads_only:
            output = super().forward(batch, TargetStates(states.features, states.last_hidden.detach()))
            # Resting parameters get a gradient of 0: DDP waits for all of them.
            return StepOutput(output.loss + sum(p.sum() * 0 for p in self.adapter.values()), output.metrics)
        if self.training and not states.last_hidden.requires_grad:
            raise TargetMismatchError(
                "medusa2 trains the target: its states must come with a graph, not from a feature cache."
            )
        output = super().forward(batch, states)
        distillation, agreement = self._distillation(states.last_hidden, batch)
        loss = distillation.to(output.loss.device) + self._weight * output.loss
        metrics = {"distillation": distillation.detach(), "agreement": agreement}
        return StepOutput(loss, {**output.metrics, **metrics})

    def save(self, folder: str | os.PathLike, target: GenerativeModel, layout: str | None = None) -> SavedHead:
        """Writes the heads, and the adapter that they belong to into `ADAPTER_FOLDER`."""
        saved = super().save(folder, target, layout)
        self._target[0].save_pretrained(os.path.join(folder, ADAPTER_FOLDER))
        return saved

    def _distillation(self, hidden: Float[Tensor, "B S H"], batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy against the original target, and the share of tokens that both prefer."""
        (target,) = self._target
        with torch.no_grad(), target.disable_adapter():
            original = self._original(batch).last_hidden.to(hidden.device)
        kept, teacher = emitting_positions(batch).to(hidden.device), self._whole_teacher
        rows, wanted = hidden[kept], original[kept]
        targets = SoftTargets(teacher.read(wanted), torch.arange(len(rows), device=rows.device))
        size = shared_size((batch["document_ids"] != NO_DOCUMENT).sum().float().to(rows.device))
        losses = cross_entropy(rows, teacher.lm_head, targets, (1 / size).expand(len(rows)))
        agrees = losses.best == teacher.argmax(wanted)
        return losses.loss, agrees.float().sum() / max(len(rows), 1)
