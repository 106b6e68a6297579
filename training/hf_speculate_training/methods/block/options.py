"""What a recipe can say of a one-pass head and of its training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DFlashShape:
    """The shape of a fresh DFlash head. None: what the target has.

    Attributes:
        num_layers: decoder layers.
        block_size: slots of a block, the anchor's included.
        first_slot: the first slot that proposes: 0, the anchor's own, as DeepSpec's heads; 1 as z-lab's.
        causal: slots see only slots up to their own, as JetSpec's, whose `first_slot` is 1: no layout has others.
        intermediate_size: of the layers.
        feature_layers: hidden states of the target that are read, see `new_block`.
        mask_token_id: what is embedded in the slots behind the anchor; best a token that no text has. None: the last of
            the target's vocabulary, which in padded vocabularies is nobody's.
        draft_vocab_size: so many of the most frequent tokens of the training data, with an output matrix of the head's
            own; None: the target's vocabulary and its output matrix, which is not trained.
    """

    num_layers: int = 2
    block_size: int = 7
    first_slot: Literal[0, 1] = 0
    causal: bool = False
    intermediate_size: int | None = None
    feature_layers: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {self.num_layers}.")
        if self.block_size <= self.first_slot:
            raise ValueError(f"block_size must be at least {self.first_slot + 1}, got {self.block_size}.")
        if self.causal and not self.first_slot:
            raise ValueError("causal heads must have first_slot 1: no layout of files has others.")
        if self.mask_token_id is not None and self.mask_token_id < 0:
            raise ValueError(f"mask_token_id must be a token, got {self.mask_token_id}.")
        if self.feature_layers is not None and not self.feature_layers:
            raise ValueError("feature_layers must name at least one hidden state.")


@dataclass(frozen=True, kw_only=True)
class DSparkShape(DFlashShape):
    """The shape of a fresh DSpark head, beside what `DFlashShape` says.

    Attributes:
        markov: kind of the Markov head, see `BlockSpec`.
        markov_rank: width of its codes. None: 256 for targets of hidden size 2048 and more, else 64.
        confidence: a head that learns how likely each slot's token is to be accepted.
        confidence_with_markov: it sees the Markov code of the token before, too.
    """

    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: int | None = None
    confidence: bool = True
    confidence_with_markov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.causal:
            raise ValueError("causal must be false: no layout of files has causal DSpark heads.")
        if self.markov_rank is not None and self.markov_rank < 1:
            raise ValueError(f"markov_rank must be at least 1, got {self.markov_rank}: without one, train dflash.")


@dataclass(frozen=True, kw_only=True)
class BlockTrainingOptions:
    """How a one-pass head is trained.

    Attributes:
        anchors: blocks of a row at the most; where they stand is drawn anew at every step.
        loss: "deepspec", what the three weights say; "kl", KL(target || draft), for which the text's own tokens do not
            count (JetSpec; its weights are uniform: `decay: null`).
        ce_weight, l1_weight: of the cross-entropy against the text's token and of the L1 distance between the target's
            and the draft's distribution, in the loss "deepspec".
        confidence_weight: of the confidence head's binary cross-entropy against 1 - L1 / 2.
        decay: the k-th proposal of a block has weight `exp(-k / decay)`; None: all have the same.
        d_pace: weights that follow what the head knows already, instead of `decay`, see `pace_weights`.
    """

    anchors: int = 64
    loss: Literal["deepspec", "kl"] = "deepspec"
    ce_weight: float = 1.0
    l1_weight: float = 0.0
    confidence_weight: float = 0.0
    decay: float | None = 4.0
    d_pace: bool = False

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
        if self.d_pace and self.loss == "kl":
            raise ValueError("d_pace goes by the text's tokens, which the loss kl leaves out.")

    @property
    def term_weights(self) -> dict[str, float]:
        """Weights of the terms of the loss, by what `SlotLosses` calls them; "confidence" is the confidence head's."""
        terms = {"kl": 1.0} if self.loss == "kl" else {"cross_entropy": self.ce_weight, "l1": self.l1_weight}
        return {name: weight for name, weight in terms.items() if weight} | {"confidence": self.confidence_weight}


@dataclass(frozen=True, kw_only=True)
class DSparkTrainingOptions(BlockTrainingOptions):
    """How a DSpark head is trained, see `BlockTrainingOptions`; the weights are DeepSpec's."""

    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
