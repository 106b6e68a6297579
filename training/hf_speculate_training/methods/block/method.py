"""Training of one-pass heads: blocks stand all over a text, and each learns to propose what follows its anchor.

Sources: DFlash (Chen et al., arXiv:2602.06036), DSpark (deepseek-ai/DeepSpec, `modeling/dspark`, whose loss the golden
vectors are of), JetSpec (hao-ai-lab/JetSpec). A block is `[anchor, mask, mask, …]` as in decoding: one step, no noise,
and none of the text's tokens but the anchor as input. Only a Markov head takes the text's token before each proposal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PretrainedConfig

from hf_speculate.target import GenerativeModel
from hf_speculate_plugins.block import BlockDrafter, BlockHead, BlockOptions

from ...data import Batch
from ...sections import RecipeError
from ...states import TargetStates
from ..contract import SMALL_HIDDEN_SIZE, CountTokens, StepOutput
from ..entries import shared_size
from ..heads import HeadMethod
from .blocks import TextBlocks, run_blocks
from .heads import DFlashShape, DSparkShape, new_block, warm_block
from .slots import SlotLosses, SlotRows, decay_weights, slot_losses


if TYPE_CHECKING:
    from typing_extensions import Self


_NOT_ZERO = 1e-6  # DeepSpec's own, so that a batch without blocks has a loss of 0
_LARGE_ANCHORS = 512


@dataclass(frozen=True, kw_only=True)
class BlockTrainingOptions:
    """Options for training a one-pass head.

    Attributes:
        anchors: blocks of a row at most, drawn again at every step.
        loss: "deepspec" for the sum by the three weights; "kl" for KL(target || draft), which does not look at the
            text's own tokens (JetSpec; its weights are uniform: `decay: null`).
        ce_weight, l1_weight: weights of two terms of the loss "deepspec": the cross-entropy against the text's token,
            and the L1 distance between the target's and the draft's distribution.
        confidence_weight: weight of the confidence head's binary cross-entropy against 1 - L1 / 2.
        decay: decay of the weights; the k-th proposal of a block has `exp(-k / decay)`. None for equal weights.
    """

    anchors: int = 64
    loss: Literal["deepspec", "kl"] = "deepspec"
    ce_weight: float = 1.0
    l1_weight: float = 0.0
    confidence_weight: float = 0.0
    decay: float | None = 4.0

    def __post_init__(self) -> None:
        if self.anchors < 1:
            raise ValueError(f"anchors must be at least 1, got {self.anchors}.")
        for name in ("ce_weight", "l1_weight", "confidence_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")
        if self.loss == "deepspec" and not (self.ce_weight or self.l1_weight):
            raise ValueError("ce_weight and l1_weight are both 0: nothing would be learnt.")
        if self.decay is not None and not 0 < self.decay < math.inf:
            raise ValueError(f"decay must be above 0, or null for none, got {self.decay}.")

    @property
    def term_weights(self) -> dict[str, float]:
        """Weights of the loss's terms by their names in `SlotLosses`; "confidence" is for the confidence head."""
        terms = {"kl": 1.0} if self.loss == "kl" else {"cross_entropy": self.ce_weight, "l1": self.l1_weight}
        return {name: weight for name, weight in terms.items() if weight} | {"confidence": self.confidence_weight}


@dataclass(frozen=True, kw_only=True)
class DSparkTrainingOptions(BlockTrainingOptions):
    """Options for training a DSpark head, see `BlockTrainingOptions`; the weights are DeepSpec's."""

    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0


MethodOptions = TypeVar("MethodOptions", bound=BlockTrainingOptions)


class BlockMethod(HeadMethod[BlockHead, MethodOptions]):
    """The common part of both methods. `new_block` and `warm_block` make its heads; arguments are `HeadMethod`'s.

    Metrics, in addition to `loss_k` and `accuracy_k` of the k-th proposal: the terms of the loss by the names of
    `BlockTrainingOptions.term_weights`, not yet weighed, and `cross_entropy`.
    """

    new_head = staticmethod(new_block)
    warm_head = staticmethod(warm_block)

    def __init__(self, head: BlockHead, target: GenerativeModel, *args: Any, **kwargs: Any):
        super().__init__(head, target, *args, **kwargs)
        self.feature_layers = tuple(dict.fromkeys(head.spec.feature_layers))
        if self.options.confidence_weight and not head.spec.confidence:
            raise RecipeError("method.options.confidence_weight must be 0: the head has no confidence head.")

    @classmethod
    def suggested(cls, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        """A draft vocabulary for large vocabularies, and DeepSpec's many blocks for large targets."""
        options = {} if config.hidden_size < SMALL_HIDDEN_SIZE else {"anchors": _LARGE_ANCHORS}
        return {**super().suggested(config), "options": options}

    @classmethod
    def for_target(
        cls, target: GenerativeModel, head: DFlashShape, options: MethodOptions, count_tokens: CountTokens
    ) -> Self:
        made = super().for_target(target, head, options, count_tokens)
        if made.head.spec.confidence and not options.confidence_weight:
            raise RecipeError(
                "method.options.confidence_weight is 0, so the confidence head would learn nothing: set "
                "method.head.confidence to false."
            )
        return made

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        batch = cast(Batch, {name: batch[name].to(self.head.device) for name in Batch.__required_keys__})
        blocks = TextBlocks.drawn(batch, self.options.anchors, self.head.spec.max_depth, at_random=self.training)
        return self.compare(blocks, self.run(batch, states, blocks), states)

    def run(self, batch: Batch, states: TargetStates, blocks: TextBlocks) -> Float[Tensor, "B A D H"]:
        """The states of the slots that propose; the batch is on the head's device."""
        context = self.head.fuse([states.features[layer] for layer in self.head.spec.feature_layers])
        return run_blocks(self.head, context, batch, blocks)[:, :, self.head.spec.first_slot :]

    def compare(self, blocks: TextBlocks, slots: Float[Tensor, "B A D H"], states: TargetStates) -> StepOutput:
        """The loss of blocks that were run."""
        rows, names = self.rows(blocks, slots, states), set(self._terms)
        if "confidence" in names:
            names.add("l1")
        losses = slot_losses(self.head, self.teacher, rows, names)
        if "confidence" in names:
            accepted = (1 - losses["l1"].detach() / 2).clamp(0, 1)
            losses["confidence"] = binary_cross_entropy_with_logits(
                self.confidence(blocks, slots).to(accepted.dtype), accepted, reduction="none"
            )
        weights, sizes = self._weights(blocks, rows)
        means = self._means(losses, weights, sizes, rows.labels >= 0)
        loss = torch.stack([weight * means[name] for name, weight in self._terms.items()]).sum()
        return StepOutput(loss, self._metrics(blocks, rows, losses, means))

    def rows(self, blocks: TextBlocks, slots: Float[Tensor, "B A D H"], states: TargetStates) -> SlotRows:
        """The proposals that count, by row, then anchor, then depth."""
        counted = blocks.counted
        return SlotRows(
            states=slots[counted],
            markov=self._markov(blocks, slots),
            labels=self.teacher.to_draft(blocks.labels[counted]),
            teachers=blocks.teachers[counted],
            hidden=states.last_hidden.detach().to(self.head.device).flatten(0, 1),
        )

    def confidence(self, blocks: TextBlocks, slots: Float[Tensor, "B A D H"]) -> Float[Tensor, " E"]:
        """Logits of the confidence head at the proposals that count."""
        return self.head.confidence(slots[blocks.counted], blocks.previous[blocks.counted])

    def drafter(self, target: GenerativeModel, **options: Any) -> BlockDrafter:
        """A drafter with the present weights; options are those of `BlockOptions`."""
        return BlockDrafter(self.decoding_head(target), target, BlockOptions(**options))

    @property
    def _terms(self) -> dict[str, float]:
        """Weights of the terms that this head has; a confidence head of weight 0 stays, as it needs a gradient."""
        terms = self.options.term_weights
        return {name: weight for name, weight in terms.items() if name != "confidence" or self.head.spec.confidence}

    def _markov(self, blocks: TextBlocks, slots: Float[Tensor, "B A D H"]) -> Float[Tensor, "E r"] | None:
        """Inputs of the Markov head's output matrix after the text's own tokens."""
        if self.head.spec.markov is None:
            return None
        markov = self.head.markov_head
        codes = markov.codes(blocks.previous)
        carried, inputs = None, []
        for depth in range(codes.shape[2]):
            each, carried = markov.inputs(slots[:, :, depth], codes[:, :, depth], carried)
            inputs.append(each)
        return torch.stack(inputs, dim=2)[blocks.counted]

    def _weights(self, blocks: TextBlocks, rows: SlotRows) -> tuple[Tensor, Tensor]:
        """Weights of the proposals that count, and two divisors [2] of sums.

        The divisors are sums of the weights over all processes (`shared_size`): of all proposals, and of those whose
        token the draft vocabulary has.
        """
        weights = decay_weights(blocks.counted, self.options.decay)[blocks.counted]
        return weights, shared_size(torch.stack([weights.sum(), (weights * (rows.labels >= 0)).sum()]))

    @staticmethod
    def _means(losses: SlotLosses, weights: Tensor, sizes: Tensor, known: Tensor) -> dict[str, Tensor]:
        """Weighted means of every loss; of the cross-entropy over tokens that the draft vocabulary has."""
        means = {}
        for name, each in losses.items():
            if name != "best":
                mine, size = (weights * known, sizes[1]) if name == "cross_entropy" else (weights, sizes[0])
                means[name] = (mine.to(each) * each).sum() / (size + _NOT_ZERO)
        return means

    @torch.no_grad()
    def _metrics(
        self, blocks: TextBlocks, rows: SlotRows, losses: SlotLosses, means: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        needed, where = rows.teachers.unique(return_inverse=True)
        wanted = self.teacher.to_draft(self.teacher.argmax(rows.hidden[needed]))[where]
        depth = blocks.counted.nonzero()[:, 2]
        num_depths = blocks.counted.shape[2]
        counts = torch.bincount(depth, minlength=num_depths).clamp(min=1)
        each = sum(weight * losses[name] for name, weight in self._terms.items())
        figures = {"loss": each, "accuracy": losses["best"] == wanted}
        found = {name: mean.detach() for name, mean in means.items()}
        for name, values in figures.items():
            sums = torch.zeros(num_depths, device=depth.device, dtype=torch.float32).index_add(
                0, depth, cast(Tensor, values).float()
            )
            found |= {f"{name}_{k}": sums[k] / counts[k] for k in range(num_depths)}
        return found


class DFlashMethod(BlockMethod[BlockTrainingOptions]):
    """Trains a head whose slots propose without knowing each other's tokens, see `BlockTrainingOptions`.

    JetSpec's heads are these with `causal: true` and `first_slot: 1`, trained with `loss: kl` and `decay: null`.
    """

    name = "dflash"
    head_class = DFlashShape
    options_class = BlockTrainingOptions


class DSparkMethod(BlockMethod[DSparkTrainingOptions]):
    """Trains a head with a Markov head and a confidence head, see `DSparkTrainingOptions`."""

    name = "dspark"
    head_class = DSparkShape
    options_class = DSparkTrainingOptions
