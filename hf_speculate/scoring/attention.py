"""Attention of a draft tree behind a long prefix, without copies of the KV heads.

As soon as a mask is given, stock `sdpa` repeats every KV head for each of its query heads, in every layer and round:
for 14 query heads over 2 KV heads it writes and reads the whole cache seven times. The query heads of one KV head can
as well stand below each other as more query *rows* of that head: "folded" is the same kernel over
`[B, KV heads, G x N, D]` queries, the mask repeated for the G heads of a group. A root alone needs no mask; stock asks
the kernel to share the KV heads then (`enable_gqa`), which on a CPU reads them once for each query head.

The mask itself says that it is folded: 4-D with G x N rows for N queries (`fold`), or without columns where nothing is
hidden. No other code makes such masks, so `grouped_sdpa`, registered for "sdpa" in transformers' AttentionInterface,
hands everything else on to stock unchanged, whoever calls it from whatever thread; no config is touched. The plain
reference is stock with the mask before `fold`.
"""

from __future__ import annotations

import os
import sys
from functools import cached_property
from typing import Any, Literal, cast, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..compatibility import incompatible
from ..errors import SpeculateError
from .walk import current_walk, is_walked


Form = Literal["stock", "folded"]
Mask = Tensor | dict[str, Tensor] | None

# Where a form was measured to win at every context and tree (`hf-speculate bench costs`); elsewhere stock.
_MEASURED: dict[str, Form] = {"cpu": "folded"}


def install_attention() -> None:
    """Puts `grouped_sdpa` in front of stock's "sdpa". Idempotent; leaves an "sdpa" that is not stock's alone.

    Raises:
        IncompatibleTransformersError: there is no such table of attentions any more.
    """
    if "sdpa" not in getattr(AttentionInterface, "_global_mapping", {}):
        raise incompatible("AttentionInterface has no table with 'sdpa'")
    if AttentionInterface._global_mapping["sdpa"] is sdpa_attention_forward:
        AttentionInterface.register("sdpa", grouped_sdpa)


def uninstall_attention() -> None:
    """Undoes `install_attention`."""
    if AttentionInterface._global_mapping["sdpa"] is grouped_sdpa:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


def takes_tree_masks(model: PreTrainedModel) -> bool:
    """Whether the forward of a model takes a `TreeMask`, and nobody sees the arguments before."""
    forward = vars(model).get("forward")
    return getattr(forward, "takes_tree_masks", False) and not (model._forward_hooks or model._forward_pre_hooks)


class TreeAttention:
    """The form in which one model is handed its tree masks.

    The environment variable HF_SPECULATE_ATTENTION names another form than the one that was measured to be best; it
    cannot make a model take one that it cannot take ("sdpa" only, and KV heads that would be repeated).

    Args:
        model: whose forwards get the masks.
        device: where it computes.
    Raises:
        SpeculateError: the environment variable names no form.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device):
        wanted = os.environ.get("HF_SPECULATE_ATTENTION") or _MEASURED.get(device.type, "stock")
        if wanted not in get_args(Form):
            raise SpeculateError(f"HF_SPECULATE_ATTENTION is {wanted!r}; possible: {', '.join(get_args(Form))}.")
        self._device = device
        self.groups = head_groups(model)
        self.form = cast(Form, wanted if self.groups > 1 else "stock")

    def arrange(self, mask: Mask, num_nodes: int, sees_prefix: bool) -> Mask:
        """The mask that the model is given.

        Args:
            mask: as stock takes it: additive [B, 1, n, M + num_nodes], one by layer type, or another form, which stays.
            num_nodes: of the tree.
            sees_prefix: whether every node attends to all keys before the tree.
        """
        if isinstance(mask, dict):
            return {name: self._arranged(each) for name, each in mask.items()}
        if mask is None:  # of one query, or of a causal chain
            is_root_alone = num_nodes == 1 and sees_prefix and self.form == "folded"
            return self._no_mask if is_root_alone else None
        return self._arranged(mask)

    @cached_property
    def _no_mask(self) -> Tensor:
        return self.without_mask(self.groups, self._device)

    @staticmethod
    def without_mask(groups: int, device: torch.device) -> Tensor:
        """The mask that stands for "folded" where every key is seen."""
        return torch.empty(1, 1, groups, 0, device=device)

    def _arranged(self, mask: Tensor) -> Tensor:
        if self.form == "stock" or mask.dim() != 4 or mask.shape[2] == 1:
            return mask
        return fold(mask, self.groups)


_known_groups: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def head_groups(model: PreTrainedModel) -> int:
    """G, query heads per KV head in every attention of `model`; 1 where folded masks would not be understood."""
    if model.config._attn_implementation != "sdpa" or ALL_ATTENTION_FUNCTIONS["sdpa"] is not grouped_sdpa:
        return 1
    if model not in _known_groups:
        _known_groups[model] = _inspect(model)
    return _known_groups[model]


def _inspect(model: PreTrainedModel) -> int:
    """G of a model whose attentions all are transformers' own way to call "sdpa"; else 1."""
    decoder: Any = model.get_decoder()
    attentions = [module for module in decoder.modules() if hasattr(module, "num_key_value_groups")]
    groups = {int(module.num_key_value_groups) for module in attentions}
    files = {sys.modules[type(module).__module__] for module in attentions}
    interfaces = {id(found): found for file in files if (found := getattr(file, "ALL_ATTENTION_FUNCTIONS", None))}
    # A modeling file with an interface of its own (Doge) does more to a mask than adding it.
    is_known = list(interfaces) == [id(ALL_ATTENTION_FUNCTIONS)] and model._supports_attention_backend
    is_known = is_known and len(attentions) == model.config.get_text_config(decoder=True).num_hidden_layers
    return groups.pop() if is_known and len(groups) == 1 else 1


def fold(mask: Tensor, groups: int) -> Tensor:
    """The form of an additive mask that asks `grouped_sdpa` not to repeat KV heads.

    Args:
        mask: [B, 1, N, S], N > 1, the same for all heads.
        groups: query heads per KV head, > 1.
    Returns:
        [B, 1, groups x N, S].
    """
    return torch.cat([mask] * groups, dim=2)


def _unfold(mask: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """The mask [B, 1, N, S] that `fold` was given."""
    return functional.pad(mask[:, :, :num_queries], (num_keys - mask.shape[-1], 0))


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stock's `sdpa_attention_forward`, and the same for masks from `fold`, with as many KV heads as there are; for a
    tree that is to be exact, node by node (`walk`).

    Args:
        query: [B, heads, N, D]; key, value: [B, KV heads, S, D].
        attention_mask: as stock takes it, or from `fold`.
    Returns:
        [B, N, heads, D] and None.
    """
    if is_walked(attention_mask):
        return current_walk().attend(sdpa_attention_forward, module, query, key, value, **kwargs)
    num_queries, num_keys = query.shape[2], key.shape[2]
    if attention_mask is None or attention_mask.dim() != 4 or attention_mask.shape[2] <= num_queries:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch_size, num_heads, _, head_dim = query.shape
    num_kv_heads = key.shape[1]
    rows = num_heads // num_kv_heads * num_queries
    if (
        attention_mask.shape[2] != rows
        or any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache"))
        or kwargs.get("dropout")
    ):
        mask = _unfold(attention_mask, num_queries, num_keys)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    scale = kwargs.get("scaling")
    scale = head_dim**-0.5 if scale is None else scale
    queries = query.reshape(batch_size, num_kv_heads, rows, head_dim)
    if attention_mask.shape[-1] == 0:
        outputs = functional.scaled_dot_product_attention(queries, key, value, scale=scale)
    else:
        outputs = functional.scaled_dot_product_attention(queries, key, value, attn_mask=attention_mask, scale=scale)
    return outputs.reshape(batch_size, num_heads, num_queries, -1).transpose(1, 2).contiguous(), None
