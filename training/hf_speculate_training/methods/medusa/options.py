"""What a recipe can say of Medusa heads and of their training."""

from __future__ import annotations

from dataclasses import dataclass

from ..entries import Normalizer


@dataclass(frozen=True, kw_only=True)
class MedusaShape:
    """The shape of fresh Medusa heads.

    Attributes:
        num_heads: D, how many tokens ahead are drafted.
        num_layers: residual blocks of each head.
        shared_lm_head: all heads use the target's output matrix, which is not trained, and files are small; False gives
            each its own copy, as the paper has it.
        draft_vocab_size: so many of the most frequent tokens of the training data, with one matrix of the heads' own;
            None: the target's vocabulary.
    """

    num_heads: int = 4
    num_layers: int = 1
    shared_lm_head: bool = True
    draft_vocab_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class MedusaTrainingOptions:
    """How Medusa heads are trained.

    Attributes:
        head_decay: the loss of head h has weight `head_decay**h`.
        normalizer: see `Entries.weights`.
        soft: learn the target's own distribution instead of the text's token.
        lean: the loss that streams the vocabulary; False takes the plain reference.
    """

    head_decay: float = 0.8
    normalizer: Normalizer = "all"
    soft: bool = False
    lean: bool = True


@dataclass(frozen=True, kw_only=True)
class Medusa2TrainingOptions(MedusaTrainingOptions):
    """How Medusa heads and an adapter of the target are trained together, beside what `MedusaTrainingOptions` says.

    Attributes:
        heads_share: of all steps, how many train the heads alone.
        warmup_share: of all steps, over how many the weight of the heads' loss rises after that.
        head_weight: that weight at its end (the paper's lambda_0).
    """

    heads_share: float = 0.3
    warmup_share: float = 0.2
    head_weight: float = 0.2
