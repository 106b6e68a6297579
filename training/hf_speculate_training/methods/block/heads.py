"""One-pass heads as training begins: fresh ones shaped after the target, and published ones."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from hf_speculate.speculator import local_folder
from hf_speculate.target import GenerativeModel, embedding_layer, embedding_rows, last_device, output_layer
from hf_speculate_plugins.block import BlockHead, BlockSpec, check_fits, load_head

from ...sections import RecipeError
from ..heads import copy_rows, initial_std, initialise, layer_sizes, refuse_added_tokens, target_rows, trainable


_NUM_FEATURES = 3
_LARGE_HIDDEN_SIZE, _LARGE_RANK, _SMALL_RANK = 2048, 256, 64
_CODE_STD = 0.3  # of fresh Markov codes


@dataclass(frozen=True, kw_only=True)
class DFlashShape:
    """The shape of a fresh DFlash head. None stands for the target's own value.

    Attributes:
        num_layers: decoder layers.
        block_size: slots of a block, the anchor's included.
        first_slot: first slot that proposes: 0, the anchor's own, as in DeepSpec's heads; 1 as in z-lab's.
        causal: True lets slots see only slots up to their own, as JetSpec's, whose `first_slot` is 1.
        intermediate_size: intermediate size of the layers.
        feature_layers: hidden states of the target that the head reads, see `new_block`.
        mask_token_id: token that is embedded in the slots after the anchor, best one that no text has. None takes the
            last of the target's vocabulary, which padded vocabularies leave unused.
        draft_vocab_size: number of the most frequent tokens of the training data to draft with, through an output
            matrix of the head's own. None takes the target's vocabulary and output matrix, which is not trained.
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
    """The shape of a fresh DSpark head, in addition to the fields of `DFlashShape`.

    Attributes:
        markov: kind of the Markov head, see `BlockSpec`.
        markov_rank: width of its codes; None for 256 if the target's hidden size is 2048 or more, else 64.
        confidence: True adds a head that learns how likely each slot's token is to be accepted.
        confidence_with_markov: True shows that head the Markov code of the token before, too.
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


def new_block(target: GenerativeModel, shape: DFlashShape, target_ids: Int[Tensor, " Vd"] | None = None) -> BlockHead:
    """A fresh one-pass head of Qwen3's layers, as wide as the target.

    Parameters are float32, on the device of the target's last layer. Embeddings and output matrix are the target's own
    and not trained; with a draft vocabulary the head has an output matrix, which begins as the target's rows. The bias
    of a Markov head is 0 at first, and its codes are the main directions of the target's embeddings: random codes learn
    more slowly (docs/log.md).

    Without `feature_layers` the head reads three of the target's states, spread over the outputs of layers 1 to L - 3
    (z-lab's rule). Of targets with fewer than 6 layers it reads the last three before the final norm.

    Raises:
        TargetMismatchError: the target does not have these layers or this mask token.
    """
    config = target.config.get_text_config(decoder=True)
    spec = BlockSpec(
        **layer_sizes(config, shape.num_layers, shape.intermediate_size),
        **_markov(config, shape),
        dialect=_dialect(shape, target_ids),
        causal=(shape.causal,) * shape.num_layers,
        block_size=shape.block_size,
        first_slot=shape.first_slot,
        mask_token_id=config.vocab_size - 1 if shape.mask_token_id is None else shape.mask_token_id,
        feature_layers=tuple(shape.feature_layers or _default_layers(config.num_hidden_layers)),
        draft_vocab_size=config.vocab_size if target_ids is None else len(target_ids),
    )
    check_fits(spec, target)
    shared = output_layer(target) if target_ids is None else None
    with torch.device("cpu"):
        head = BlockHead(spec, embedding_layer(target), shared)
    initialise(head, initial_std(config))
    if spec.markov is not None:
        _begin_markov(head, target)
    if target_ids is not None:
        copy_rows(head.lm_head.weight, target_rows(target, target_ids))
    return head.to(last_device(target))


def warm_block(folder: str | os.PathLike, target: GenerativeModel) -> tuple[BlockHead, Int[Tensor, " Vd"] | None]:
    """A published one-pass head (folder or Hub id) whose training continues, and its draft vocabulary.

    Embeddings and a whole output matrix of its own stay as its trainer left them.

    Raises:
        RecipeError: a part that these methods do not train, such as a selector or sinks; a target with more tokens.
    """
    loaded = load_head(local_folder(os.fspath(folder)), target, packed=False)
    parts = {"dflash2": "selector", "domino": "recurrent state", "xpress": "refiner", "lilicorr": "lattice"}
    spec = loaded.head.spec
    if (part := "attention sinks" if spec.attention_sinks else parts.get(spec.method)) is not None:
        raise RecipeError(f"method.start_from: this {spec.method} head has a part that is not trained here: {part}.")
    refuse_added_tokens(spec.vocab_size, target)
    head = trainable(loaded.head)
    for name in ("embed_tokens", "lm_head"):
        if hasattr(head, name) and (name == "embed_tokens" or loaded.target_ids is None):
            getattr(head, name).requires_grad_(False)
    return head, loaded.target_ids


@torch.no_grad()
def _begin_markov(head: BlockHead, target: GenerativeModel) -> None:
    codes, output = head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight
    copy_rows(codes, embedding_rows(embedding_layer(target), len(codes)))
    codes.mul_(_CODE_STD / codes.std())
    output.zero_()


def _default_layers(depth: int) -> tuple[int, ...]:
    if depth < _NUM_FEATURES + 3:  # the rule would name a layer twice
        return tuple(range(max(depth - _NUM_FEATURES, 0), depth))
    return tuple(round(1 + i * (depth - 4) / (_NUM_FEATURES - 1)) + 1 for i in range(_NUM_FEATURES))


def _markov(config: Any, shape: DFlashShape) -> dict[str, Any]:
    if not isinstance(shape, DSparkShape):
        return {"method": "dflash"}
    rank = _LARGE_RANK if config.hidden_size >= _LARGE_HIDDEN_SIZE else _SMALL_RANK
    return {
        "method": "dspark",
        "markov": shape.markov,
        "markov_rank": shape.markov_rank or rank,
        "confidence": shape.confidence,
        "confidence_with_markov": shape.confidence and shape.confidence_with_markov,
    }


def _dialect(shape: DFlashShape, target_ids: Tensor | None) -> Literal["zlab", "deepspec", "speculators"]:
    """A layout that can express the head. Only speculators' knows draft vocabularies, and Markov heads whose anchor
    proposes nothing."""
    if target_ids is not None or (shape.first_slot and isinstance(shape, DSparkShape)):
        return "speculators"
    return "zlab" if shape.first_slot else "deepspec"
