"""Training of one-pass heads: blocks stand all over a text, and each learns to propose what follows its anchor.

Sources: DFlash (Chen et al., arXiv:2602.06036), DSpark (deepseek-ai/DeepSpec, `modeling/dspark`, whose loss the golden
vectors are of), JetSpec (hao-ai-lab/JetSpec). A block is `[anchor, mask, mask, …]` as in decoding: one step, no noise,
the text's tokens never its input but for the anchor. Only what a Markov head takes as the token before is the text's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PretrainedConfig, PreTrainedModel

from hf_speculate.models import unwrap
from hf_speculate_plugins.block import BlockDrafter, BlockHead, BlockOptions

from ...data import Batch
from ...sections import RecipeError
from ...states import TargetStates
from ..contract import SMALL_HIDDEN_SIZE, CountTokens, StepOutput
from ..head_method import HeadMethod
from ..processes import shared_size
from ..vocabulary import DRAFT_VOCAB_SIZE, choose_vocabulary, suggested_vocabulary
from .attention import run_blocks
from .blocks import Blocks
from .new_head import new_block, warm_block
from .options import BlockTrainingOptions, DFlashShape
from .slots import SlotLosses, SlotRows, decay_weights, pace_weights, slot_losses


if TYPE_CHECKING:
    from typing_extensions import Self


Options = TypeVar("Options", bound=BlockTrainingOptions)

# DeepSpec's own, so that a batch without blocks has a loss of 0.
_NOT_ZERO = 1e-6
_LARGE_ANCHORS = 512


class BaseBlockMethod(HeadMethod[BlockHead, Options]):
    """What the training of all one-pass heads shares.

    Metrics, beside `loss_k` and `accuracy_k` of the k-th proposal: the terms of the loss by the names of
    `BlockTrainingOptions.term_weights`, not yet weighed, and `cross_entropy`.

    Args:
        head: the head, with parameters in float32; see `new_block` and `warm_block`.
        target: whose states it reads; only its output layer is kept, and not as a submodule.
        target_ids: int64 [Vd], target id of each draft id, ascending; None where they are the same.
        options: of `options_class`; None: its defaults.
    """

    def __init__(
        self,
        head: BlockHead,
        target: PreTrainedModel,
        target_ids: Int[Tensor, " Vd"] | None = None,
        options: Options | None = None,
    ):
        super().__init__(head, target, target_ids, options)
        self.feature_layers = tuple(dict.fromkeys(head.spec.feature_layers))
        if self.options.confidence_weight and not head.spec.confidence:
            raise RecipeError("method.options.confidence_weight must be 0: the head has no confidence head.")

    @classmethod
    def suggested(cls, config: PretrainedConfig) -> dict[str, dict[str, Any]]:
        """A draft vocabulary for large vocabularies; DeepSpec's many blocks where rows are long."""
        size = suggested_vocabulary(config)
        options = {} if config.hidden_size < SMALL_HIDDEN_SIZE else {"anchors": _LARGE_ANCHORS}
        return {"head": {} if size is None else {DRAFT_VOCAB_SIZE: size}, "options": options}

    @classmethod
    def for_target(cls, target: nn.Module, head: DFlashShape, options: Options, count_tokens: CountTokens) -> Self:
        model = unwrap(target)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        target_ids = choose_vocabulary(head.draft_vocab_size, vocab_size, count_tokens)
        made = cls(new_block(model, head, target_ids), model, target_ids, options)
        if made.head.spec.confidence and not options.confidence_weight:
            raise RecipeError(
                "method.options.confidence_weight is 0, so the confidence head would learn nothing: set "
                "method.head.confidence to false."
            )
        return made

    @classmethod
    def from_folder(cls, folder: str, target: nn.Module, options: Options) -> Self:
        model = unwrap(target)
        head, target_ids = warm_block(folder, model)
        return cls(head, model, target_ids, options)

    def forward(self, batch: Batch, states: TargetStates) -> StepOutput:
        batch = cast(Batch, {name: batch[name].to(self.head.device) for name in Batch.__required_keys__})
        blocks = Blocks.drawn(batch, self.options.anchors, self.head.spec.max_depth, at_random=self.training)
        return self.compare(blocks, self.run(batch, states, blocks), states)

    def run(self, batch: Batch, states: TargetStates, blocks: Blocks) -> Float[Tensor, "B A D H"]:
        """The states of the slots that propose.

        Args:
            batch: on the head's device.
        """
        context = self.head.fuse([states.features[layer] for layer in self.head.spec.feature_layers])
        return run_blocks(self.head, context, batch, blocks)[:, :, self.head.spec.first_slot :]

    def compare(self, blocks: Blocks, slots: Float[Tensor, "B A D H"], states: TargetStates) -> StepOutput:
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
        weights, sizes = self._weights(blocks, losses, rows)
        means = self._means(losses, weights, sizes, rows.labels >= 0)
        loss = torch.stack([weight * means[name] for name, weight in self._terms.items()]).sum()
        return StepOutput(loss, self._metrics(blocks, rows, losses, means))

    def rows(self, blocks: Blocks, slots: Float[Tensor, "B A D H"], states: TargetStates) -> SlotRows:
        """The proposals that count, by row, then anchor, then depth."""
        counted = blocks.counted
        return SlotRows(
            states=slots[counted],
            markov=self._markov(blocks, slots),
            labels=self.teacher.to_draft(blocks.labels[counted]),
            teachers=blocks.teachers[counted],
            hidden=states.last_hidden.detach().to(self.head.device).flatten(0, 1),
        )

    def confidence(self, blocks: Blocks, slots: Float[Tensor, "B A D H"]) -> Float[Tensor, " E"]:
        """Logits of the confidence head at the proposals that count."""
        return self.head.confidence(slots[blocks.counted], blocks.previous[blocks.counted])

    def drafter(self, target: PreTrainedModel, **options: Any) -> BlockDrafter:
        """Options are those of `BlockOptions`."""
        return BlockDrafter(self.decoding_head(target), target, BlockOptions(**options))

    @property
    def _terms(self) -> dict[str, float]:
        """Weights of the terms that this head has. A confidence head of weight 0 stays: it waits for its gradient."""
        terms = self.options.term_weights
        return {name: weight for name, weight in terms.items() if name != "confidence" or self.head.spec.confidence}

    def _markov(self, blocks: Blocks, slots: Float[Tensor, "B A D H"]) -> Float[Tensor, "E r"] | None:
        """What the Markov head's output matrix takes behind the text's own tokens."""
        if self.head.spec.markov is None:
            return None
        markov = self.head.markov_head
        codes = markov.codes(blocks.previous)
        carried, inputs = None, []
        for depth in range(codes.shape[2]):
            each, carried = markov.inputs(slots[:, :, depth], codes[:, :, depth], carried)
            inputs.append(each)
        return torch.stack(inputs, dim=2)[blocks.counted]

    def _weights(self, blocks: Blocks, losses: SlotLosses, rows: SlotRows) -> tuple[Tensor, Tensor]:
        """Weights of the proposals that count; and what sums are divided by [2]: of all of them, and of those whose
        token the draft vocabulary has. It is the sum of the weights, as `shared_size` has it.

        D-PACE's weights are parts of a draft's length: what they add up to must not be divided away
        (sgl-project/SpecForge#828, by its author), so the divisor is the number of blocks.
        """
        known = rows.labels >= 0
        if not self.options.d_pace:
            weights = decay_weights(blocks.counted, self.options.decay)[blocks.counted]
            return weights, shared_size(torch.stack([weights.sum(), (weights * known).sum()]))
        probs = torch.exp(-losses["cross_entropy"].detach()) * known
        confidence = torch.zeros(blocks.counted.shape, dtype=probs.dtype, device=probs.device)
        confidence[blocks.counted] = probs
        num_blocks = blocks.counted.any(-1).sum().float()
        return pace_weights(confidence, blocks.counted)[blocks.counted], shared_size(num_blocks.expand(2))

    @staticmethod
    def _means(losses: SlotLosses, weights: Tensor, sizes: Tensor, known: Tensor) -> dict[str, Tensor]:
        """Weighted means of every loss; the cross-entropy's over those whose token the draft vocabulary has."""
        means = {}
        for name, each in losses.items():
            if name != "best":
                mine, size = (weights * known, sizes[1]) if name == "cross_entropy" else (weights, sizes[0])
                means[name] = (mine.to(each) * each).sum() / (size + _NOT_ZERO)
        return means

    @torch.no_grad()
    def _metrics(
        self, blocks: Blocks, rows: SlotRows, losses: SlotLosses, means: dict[str, Tensor]
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
            sums = torch.zeros(num_depths, device=depth.device).index_add(0, depth, cast(Tensor, values).float())
            found |= {f"{name}_{k}": sums[k] / counts[k] for k in range(num_depths)}
        return found
