"""Attention of a draft tree behind a long prefix, without copies of the KV heads.

As soon as a mask is given, stock `sdpa` repeats every KV head for each of its query heads, in every layer and round:
for 14 query heads over 2 KV heads it writes and reads the whole cache seven times. The query heads of one KV head can
as well stand below each other as more query *rows* of that head. Two forms of that:

- "folded": the same kernel over `[B, KV heads, G x N, D]` queries; the mask is repeated for the G heads of a group.
  A root alone needs no mask; stock asks the kernel to share the KV heads then (`enable_gqa`), which on a CPU reads them
  once for each query head.
- "split": the prefix, which every node sees whole, needs no mask, so that kernels take it that take none (flash
  attention and its split over the keys); the N nodes among themselves are computed apart and the two are merged by
  their log-sum-exp (as FlashDecoding does, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

The mask itself says which form is wanted: a 4-D mask with G x N rows for N queries (`fold`), for "split" with columns
for the last keys only, without columns where nothing is hidden. No other code makes such masks, so `grouped_sdpa`,
registered for "sdpa" in transformers' AttentionInterface, hands everything else on to stock unchanged, whoever calls it
from whatever thread; no config is touched. The plain reference is stock with the mask before `fold`.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal, cast, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .errors import SpeculateError


Form = Literal["stock", "folded", "split"]
Mask = Tensor | dict[str, Tensor] | None

# Where a form was measured to win at every context and tree (`hf-speculate bench attention`); elsewhere stock.
_MEASURED: dict[str, Form] = {"cpu": "folded"}


def install() -> None:
    """Puts `grouped_sdpa` in front of stock's "sdpa". Idempotent; leaves an "sdpa" that is not stock's alone."""
    if AttentionInterface._global_mapping["sdpa"] is sdpa_attention_forward:
        AttentionInterface.register("sdpa", grouped_sdpa)


def uninstall() -> None:
    """Undoes `install`."""
    if AttentionInterface._global_mapping["sdpa"] is grouped_sdpa:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


class TreeAttention:
    """How the tree masks of one model are handed to it.

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
            num_nodes: keys that `mask` is about.
            sees_prefix: whether every query attends to all the other keys, so that "split" may leave them out.
        """
        if isinstance(mask, dict):
            return {name: self._arranged(each, None) for name, each in mask.items()}
        if mask is None:  # of one query, or of a causal chain
            is_root_alone = num_nodes == 1 and sees_prefix and self.form == "folded"
            return self.without_mask(self.groups, self._device) if is_root_alone else None
        return self._arranged(mask, num_nodes if self.form == "split" and sees_prefix else None)

    @staticmethod
    def without_mask(groups: int, device: torch.device) -> Tensor:
        """What stands for "folded" where every key is seen."""
        return torch.empty(1, 1, groups, 0, device=device)

    def _arranged(self, mask: Tensor, num_columns: int | None) -> Tensor:
        if self.form == "stock" or mask.dim() != 4 or mask.shape[2] == 1:
            return mask
        return fold(mask, self.groups, num_columns)


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


def fold(mask: Tensor, groups: int, num_columns: int | None = None) -> Tensor:
    """The form of an additive mask that asks `grouped_sdpa` not to repeat KV heads.

    Args:
        mask: [B, 1, N, S], N > 1, the same for all heads.
        groups: query heads per KV head, > 1.
        num_columns: "split": so many of the last keys have columns in the result; all keys before are seen by every
            query whatever `mask` says of them. None: "folded".
    Returns:
        [B, 1, groups x N, S or num_columns].
    """
    if num_columns is not None:
        mask = mask[..., -num_columns:]
    return mask.repeat(1, 1, groups, 1)


def _unfold(mask: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """What `fold` was given, [B, 1, N, S]."""
    return functional.pad(mask[:, :, :num_queries], (num_keys - mask.shape[-1], 0))


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stock's `sdpa_attention_forward`, and the same for masks from `fold`, with as many KV heads as there are.

    Args:
        query: [B, heads, N, D]; key, value: [B, KV heads, S, D].
        attention_mask: as stock takes it, or from `fold`.
    Returns:
        [B, N, heads, D] and None.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    if attention_mask is None or attention_mask.dim() != 4 or attention_mask.shape[2] <= num_queries:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch_size, num_heads, _, head_dim = query.shape
    num_kv_heads = key.shape[1]
    is_split = 0 < attention_mask.shape[-1] < num_keys
    rows = num_heads // num_kv_heads * num_queries
    if (
        attention_mask.shape[2] != rows
        or any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache"))
        or kwargs.get("dropout")
        or (is_split and not _takes_split(query, value))
    ):
        mask = _unfold(attention_mask, num_queries, num_keys)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    scale = kwargs.get("scaling")
    scale = head_dim**-0.5 if scale is None else scale
    queries = query.reshape(batch_size, num_kv_heads, rows, head_dim)
    if attention_mask.shape[-1] == 0:
        outputs = functional.scaled_dot_product_attention(queries, key, value, scale=scale)
    elif is_split:
        outputs = _split(queries, key, value, attention_mask, scale)
    else:
        outputs = functional.scaled_dot_product_attention(queries, key, value, attn_mask=attention_mask, scale=scale)
    return outputs.reshape(batch_size, num_heads, num_queries, -1).transpose(1, 2).contiguous(), None


def _takes_split(query: Tensor, value: Tensor) -> bool:
    """Whether a kernel that tells its log-sum-exp takes these tensors."""
    head_dim = query.shape[-1]
    if query.device.type == "cpu":
        return value.shape[-1] == head_dim
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    fits = head_dim % 8 == 0 and head_dim <= 256 and value.shape[-1] == head_dim
    return fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _split(queries: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention over all keys where the mask is about the last `mask.shape[-1]` of them."""
    num_prefix = key.shape[2] - mask.shape[-1]
    prefix, prefix_weight = _unmasked(queries, key[:, :, :num_prefix], value[:, :, :num_prefix], scale)
    # The rest is N x N for a group: too little for its way of being computed to matter.
    precision = torch.promote_types(queries.dtype, torch.float32)
    scores = (queries @ key[:, :, num_prefix:].transpose(-1, -2)).to(precision) * scale + mask
    nodes = scores.softmax(-1).to(queries.dtype) @ value[:, :, num_prefix:]
    share = (prefix_weight - scores.logsumexp(-1)).sigmoid()[..., None]
    return torch.lerp(nodes.to(precision), prefix.to(precision), share.to(precision)).to(queries.dtype)


def _unmasked(queries: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs [B, KV heads, rows, D] and log-sum-exp [B, KV heads, rows] of attention without a mask."""
    if queries.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, key, value, scale=scale)
    outputs, weights, *_ = torch.ops.aten._scaled_dot_product_flash_attention(queries, key, value, scale=scale)
    return outputs, weights
