"""What a recipe can say of an EAGLE head and of its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..entries import Normalizer


@dataclass(frozen=True, kw_only=True)
class EagleShape:
    """The shape of a fresh EAGLE head: fields of `EagleSpec`. None: what the target or the method has.

    Attributes:
        num_layers: decoder layers.
        hidden_act, rms_norm_eps, rope, max_position_embeddings: of every layer; the target's.
        intermediate_size: None keeps the target's ratio to the hidden size.
        head_dim: of every attention head.
        fc_bias, qkv_bias, o_bias, mlp_bias, qk_norm, norm_before_residual, norm_embedding, norm_logits,
            feed_back_normed: see `EagleSpec`.
        windows: for each layer the length of its sliding attention window, None for full attention.
    """

    num_layers: int = 1
    intermediate_size: int | None = None
    head_dim: int | None = None
    hidden_act: str | None = None
    rms_norm_eps: float | None = None
    rope: dict[str, Any] | None = None
    max_position_embeddings: int | None = None
    fc_bias: bool | None = None
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool | None = None
    norm_before_residual: bool | None = None
    norm_embedding: bool | None = None
    norm_logits: bool | None = None
    feed_back_normed: bool | None = None
    windows: tuple[int | None, ...] | None = None

    def given(self, *without: str) -> dict[str, Any]:
        """The fields that say something, for `new_eagle3` and `new_eagle1`."""
        return {name: value for name, value in vars(self).items() if value is not None and name not in without}


@dataclass(frozen=True, kw_only=True)
class Eagle3Shape(EagleShape):
    """The shape of a fresh EAGLE-3 head.

    Attributes:
        hidden_size: Hd, None for the target's; a wider or narrower head has embeddings of its own.
        num_heads, num_kv_heads: None: as many as fit `hidden_size` with the target's head size and grouping.
        feature_layers: hidden states of the target that are read, see `new_eagle3`.
        own_embeddings: whether the head has (and trains) embeddings of its own. None: only where it must.
        own_output: False: the output matrix stays the target's, or its rows for the draft vocabulary, and is not
            trained; the layout "compact" leaves it out of the files.
        draft_vocab_size: so many of the most frequent tokens of the training data; None: the target's vocabulary.
        norm_before_fc, fc_norm: see `EagleSpec`.
    """

    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    feature_layers: tuple[int, ...] | None = None
    own_embeddings: bool | None = None
    own_output: bool | None = None
    draft_vocab_size: int | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None


@dataclass(frozen=True, kw_only=True)
class EagleTrainingOptions:
    """How an EAGLE head is trained.

    Attributes:
        steps: unrolled steps K, that is how deep a draft the head learns to make.
        step_decay: the loss of step k has weight `step_decay**k`.
        normalizer: see `Entries.weights`.
        keep_unknown: also learn where the target's best token is outside the draft vocabulary (as `speculators`; the
            reference leaves these entries out, since no draft can be right there).
        noise: features get uniform noise from [-noise, noise] while training.
        lean: the loss that streams the vocabulary; False takes the plain reference.
        checkpoint_steps: recompute each step in the backward instead of keeping its activations.
    """

    steps: int
    step_decay: float = 0.8
    normalizer: Normalizer = "all"
    keep_unknown: bool = False
    noise: float = 0.0
    lean: bool = True
    checkpoint_steps: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}.")


@dataclass(frozen=True, kw_only=True)
class Eagle3TrainingOptions(EagleTrainingOptions):
    """How an EAGLE-3 head is trained, see `EagleTrainingOptions`."""

    steps: int = 7


@dataclass(frozen=True, kw_only=True)
class Eagle1TrainingOptions(EagleTrainingOptions):
    """How an EAGLE-1 head is trained, beside what `EagleTrainingOptions` says.

    Attributes:
        feature_weight, token_weight: of the regression (smooth L1, mean over the hidden size) and of the cross-entropy.
        noise: the features' uniform noise; the reference takes 0.1 at 512 tokens.
    """

    steps: int = 1
    noise: float = 0.1
    feature_weight: float = 1.0
    token_weight: float = 0.1
