"""Medusa heads as training begins: fresh ones shaped after the target, or published ones to go on from.

Parameters are float32 and on the device of the target's last layer; what they share with the target stays the target's.
"""

from __future__ import annotations

import os

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.hub import local_folder
from hf_speculate.target import last_device
from hf_speculate_plugins.medusa import MedusaDrafter, MedusaHeads

from ..weights import copy_rows, target_rows, trainable


def new_medusa(
    target: PreTrainedModel,
    num_heads: int = 4,
    num_layers: int = 1,
    *,
    shared_lm_head: bool = True,
    target_ids: Int[Tensor, " Vd"] | None = None,
) -> MedusaHeads:
    """Fresh Medusa heads: blocks that do nothing, so that each head predicts what the target does (paper, section 2.2).

    Args:
        shared_lm_head: all heads use the target's output matrix, which is not trained, and files are small; False gives
            each its own copy, as the paper has it.
        target_ids: a truncated vocabulary; the heads then share one matrix of their own, the target's rows.
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


def warm_medusa(folder: str | os.PathLike, target: PreTrainedModel) -> MedusaHeads:
    """Published Medusa heads (folder or Hub id) to train on."""
    return trainable(MedusaDrafter.from_folder(local_folder(os.fspath(folder)), target).heads)
