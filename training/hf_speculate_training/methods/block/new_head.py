"""One-pass heads as training begins: fresh ones shaped after the target, or published ones to go on from.

Parameters are float32 and on the device of the target's last layer; what they share with the target stays the target's.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.hub import local_folder
from hf_speculate.target import embedding_rows, last_device
from hf_speculate_plugins.block import BlockHead, BlockSpec, check_fits, load_head

from ...sections import RecipeError
from ..weights import copy_rows, initialise, target_rows, trainable
from .options import DFlashShape, DSparkShape


_NUM_FEATURES = 3
_LARGE_HIDDEN_SIZE, _LARGE_RANK, _SMALL_RANK = 2048, 256, 64
_CODE_STD = 0.3  # of fresh Markov codes


def new_block(target: PreTrainedModel, shape: DFlashShape, target_ids: Int[Tensor, " Vd"] | None = None) -> BlockHead:
    """A fresh one-pass head of Qwen3's layers, as wide as the target.

    Embeddings and output matrix are the target's own and not trained; with a draft vocabulary the head has an output
    matrix, which begins as the target's rows. The bias of a Markov head is 0 at first, and its codes are what the
    target's embeddings differ in most: codes that begin at random are learnt later (docs/log.md).

    Args:
        shape: see `DFlashShape`, `DSparkShape`. Without `feature_layers` three of the target's states are read, spread
            over the outputs of layers 1 to L - 3 (z-lab's rule); of targets with fewer than 6 layers the last three
            before the final norm.
        target_ids: the draft vocabulary (`draft_vocabulary`), ascending; None for the whole vocabulary.

    Raises:
        TargetMismatchError: layers or a mask token that the target has not.
    """
    config = target.config.get_text_config(decoder=True)
    spec = BlockSpec(
        **_sizes(config, shape),
        **_block(config, shape),
        **_conditions(config, shape),
        dialect=_dialect(shape, target_ids),
        draft_vocab_size=config.vocab_size if target_ids is None else len(target_ids),
    )
    check_fits(spec, target)
    shared = target.get_output_embeddings() if target_ids is None else None
    with torch.device("cpu"):
        head = BlockHead(spec, target.get_input_embeddings(), shared)
    initialise(head, config.initializer_range)
    if spec.markov is not None:
        _begin_markov(head, target)
    if target_ids is not None:
        copy_rows(head.lm_head.weight, target_rows(target, target_ids))
    return head.to(last_device(target))


def warm_block(folder: str | os.PathLike, target: PreTrainedModel) -> tuple[BlockHead, Int[Tensor, " Vd"] | None]:
    """A published one-pass head (folder or Hub id) to train on, and its draft vocabulary.

    Embeddings and a whole output matrix of its own stay as they are, as its trainer left them.

    Raises:
        RecipeError: a DFlash2 head, whose selector these methods do not train.
    """
    loaded = load_head(local_folder(os.fspath(folder)), target)
    if loaded.head.spec.method == "dflash2":
        raise RecipeError("method.start_from: this is a DFlash2 head, and its selector is not trained here.")
    head = trainable(loaded.head)
    for name in ("embed_tokens", "lm_head"):
        if hasattr(head, name) and (name == "embed_tokens" or loaded.target_ids is None):
            getattr(head, name).requires_grad_(False)
    return head, loaded.target_ids


@torch.no_grad()
def _begin_markov(head: BlockHead, target: PreTrainedModel) -> None:
    codes, output = head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight
    copy_rows(codes, embedding_rows(target.get_input_embeddings(), len(codes)))
    codes.mul_(_CODE_STD / codes.std())
    output.zero_()


def _sizes(config: Any, shape: DFlashShape) -> dict[str, Any]:
    heads = config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_layers": shape.num_layers,
        "intermediate_size": shape.intermediate_size or config.intermediate_size,
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope": dict(config.rope_parameters),
        "max_position_embeddings": config.max_position_embeddings,
        "windows": (None,) * shape.num_layers,
        "causal": (shape.causal,) * shape.num_layers,
    }


def _block(config: Any, shape: DFlashShape) -> dict[str, Any]:
    mask = config.vocab_size - 1 if shape.mask_token_id is None else shape.mask_token_id
    layers = shape.feature_layers or _default_layers(config.num_hidden_layers)
    return {
        "block_size": shape.block_size,
        "first_slot": shape.first_slot,
        "mask_token_id": mask,
        "feature_layers": tuple(layers),
    }


def _default_layers(depth: int) -> tuple[int, ...]:
    if depth < _NUM_FEATURES + 3:  # the rule would name a layer twice
        return tuple(range(max(depth - _NUM_FEATURES, 0), depth))
    return tuple(round(1 + i * (depth - 4) / (_NUM_FEATURES - 1)) + 1 for i in range(_NUM_FEATURES))


def _conditions(config: Any, shape: DFlashShape) -> dict[str, Any]:
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
    """A layout that can say what the head is: only speculators' has draft vocabularies, and Markov heads whose anchor
    proposes nothing."""
    if target_ids is not None or (shape.first_slot and isinstance(shape, DSparkShape)):
        return "speculators"
    return "zlab" if shape.first_slot else "deepspec"
