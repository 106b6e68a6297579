"""Attention of a draft tree after a long prefix, without copies of the KV heads.

Given a mask, stock `sdpa` repeats every KV head for each of its query heads, in every layer and round. With 14 query
heads on 2 KV heads it writes and reads the whole cache seven times. The query heads of one KV head can instead be
stacked as more query *rows* of that head. "folded" is the same kernel over `[B, KV heads, G x N, D]` queries, with the
mask repeated for the G heads of a group. A root alone needs no mask. Stock then lets the kernel share KV heads
(`enable_gqa`), which on a CPU reads them once for each query head.

On GPUs a captured forward passes no mask, but the sentinel (`in_progress`): a kernel that splits the keys attends
(`tree_kernel`).

The mask itself shows its form: folded ones are 4-D with G x N rows for N queries (`fold`), or have no columns if
nothing is hidden. No other code makes such masks. `grouped_sdpa` is registered for "sdpa" in transformers'
AttentionInterface and passes all other masks to stock unchanged. No config is changed. The plain reference is stock
with the mask before it was folded.
"""

from __future__ import annotations

import os
import sys
from functools import cached_property
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..compatibility import incompatible
from ..errors import SpeculateError
from ..target import GenerativeModel, decoder_of
from .in_progress import attention_in_progress, is_sentinel
from .tree_kernel import has_kernel


MaskForm = Literal["stock", "folded", "kernel"]
Mask = Tensor | dict[str, Tensor] | None

# The form that was fastest at every context and tree (`hf-speculate bench costs`); others use stock.
_MEASURED: dict[str, MaskForm] = {"cpu": "folded"}


def install_attention() -> None:
    """Registers `grouped_sdpa` as "sdpa". A second call does nothing; an "sdpa" that is not stock's stays.

    The first request with a speculator calls it: until then, attention is untouched and its module not imported.

    Raises:
        IncompatibleTransformersError: transformers has no such table of attentions any more.
    """
    if "sdpa" not in getattr(transformers.AttentionInterface, "_global_mapping", {}):
        raise incompatible("AttentionInterface has no table with 'sdpa'")
    known: Any = transformers.AttentionInterface._global_mapping["sdpa"]
    if known is sdpa_attention_forward or known.__module__ == __name__:  # or of a dropped import of this module
        transformers.AttentionInterface.register("sdpa", grouped_sdpa)


def uninstall_attention() -> None:
    """Undoes `install_attention`."""
    if (
        "transformers.modeling_utils" in sys.modules
        and transformers.AttentionInterface._global_mapping["sdpa"] is grouped_sdpa
    ):
        transformers.AttentionInterface.register("sdpa", sdpa_attention_forward)


def _attentions() -> Any:
    """The table in which models find their attention."""
    return transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS


class TreeAttention:
    """The form in which a model gets its tree masks.

    The environment variable HF_SPECULATE_ATTENTION can choose another form. A model that cannot take folded masks
    keeps stock's: that needs "sdpa" and KV heads that stock would repeat.

    Args:
        model: model that gets the masks.
        device: device of its computation.

    Raises:
        SpeculateError: the environment variable names no form.
    """

    def __init__(self, model: GenerativeModel, device: torch.device):
        wanted = os.environ.get("HF_SPECULATE_ATTENTION") or _MEASURED.get(device.type, "stock")
        if wanted not in get_args(MaskForm):
            raise SpeculateError(f"HF_SPECULATE_ATTENTION is {wanted!r}; possible: {', '.join(get_args(MaskForm))}.")
        install_attention()
        self._device = device
        self._is_known = head_groups(model) > 0
        self.groups = max(head_groups(model), 1)
        self.form: MaskForm = "folded" if wanted == "folded" and self.groups > 1 else "stock"

    def captured_form(self, dtype: torch.dtype) -> MaskForm:
        """The form for forwards of static shape, whose queries and keys have this dtype."""
        return "kernel" if self._is_known and kernel_fits(dtype, self._device) else self.form

    def arrange(self, mask: Mask, num_nodes: int, sees_prefix: bool) -> Mask:
        """The mask in the form for the model.

        Args:
            mask: mask for stock: additive [B, 1, n, M + num_nodes], or one by layer type. Any other form stays as it
                is.
            num_nodes: number of nodes of the tree.
            sees_prefix: whether every node attends to all keys before the tree.
        """
        if isinstance(mask, dict):
            return {name: self._arranged(each) for name, each in mask.items()}
        if mask is None:  # for one query, or a causal chain
            is_root_alone = num_nodes == 1 and sees_prefix and self.form == "folded"
            return self._no_mask if is_root_alone else None
        return self._arranged(mask)

    @cached_property
    def _no_mask(self) -> Tensor:
        return self.without_mask(self.groups, self._device)

    @staticmethod
    def without_mask(groups: int, device: torch.device) -> Tensor:
        """The mask that means "folded, and every key is seen"."""
        return torch.empty(1, 1, groups, 0, device=device, dtype=torch.float32)

    def _arranged(self, mask: Tensor) -> Tensor:
        if self.form == "stock" or mask.dim() != 4 or mask.shape[2] == 1:
            return mask
        return fold(mask, self.groups)


KERNEL_DEVICES = frozenset({"cuda"})
"""Types of devices on which the kernel computes attention."""


def kernel_fits(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel computes attention over trees in this dtype.

    It multiplies 16-bit numbers on tensor cores; for float32 others are faster. HF_SPECULATE_ATTENTION can choose
    another form.
    """
    is_fit = dtype in (torch.bfloat16, torch.float16) and device.type in KERNEL_DEVICES
    return is_fit and os.environ.get("HF_SPECULATE_ATTENTION", "kernel") == "kernel" and has_kernel()


_known_groups: WeakKeyDictionary[GenerativeModel, int] = WeakKeyDictionary()


def head_groups(model: GenerativeModel) -> int:
    """G, the number of query heads for each KV head in every attention of `model`; 0 if `grouped_sdpa` does not compute
    all of them."""
    if model.config._attn_implementation != "sdpa" or _attentions()["sdpa"] is not grouped_sdpa:
        return 0
    if model not in _known_groups:
        _known_groups[model] = _inspect(model)
    return _known_groups[model]


def _inspect(model: GenerativeModel) -> int:
    """G of a model whose attentions all call "sdpa" in transformers' own way; else 0."""
    decoder: Any = decoder_of(model)
    attentions = [module for module in decoder.modules() if hasattr(module, "num_key_value_groups")]
    groups = {int(module.num_key_value_groups) for module in attentions}
    files = {sys.modules[type(module).__module__] for module in attentions}
    interfaces = {id(found): found for file in files if (found := getattr(file, "ALL_ATTENTION_FUNCTIONS", None))}
    # A modeling file with its own interface (Doge) does more with a mask than add it.
    is_known = list(interfaces) == [id(_attentions())] and model._supports_attention_backend
    is_known = is_known and len(attentions) == model.config.get_text_config(decoder=True).num_hidden_layers
    return groups.pop() if is_known and len(groups) == 1 else 0


def fold(mask: Tensor, groups: int) -> Tensor:
    """The mask in the form with which `grouped_sdpa` does not repeat KV heads.

    Args:
        mask: additive mask [B, 1, N, S], N > 1, the same for all heads.
        groups: number of query heads for each KV head, above 1.

    Returns:
        [B, 1, groups x N, S].
    """
    return torch.cat([mask] * groups, dim=2)


def _unfold(mask: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """The mask [B, 1, N, S] from which `fold` made this one."""
    return functional.pad(mask[:, :, :num_queries], (num_keys - mask.shape[-1], 0))


def does_more(kwargs: dict[str, Any]) -> bool:
    """Whether an attention does more than scale, mask and mix."""
    return bool(kwargs.get("dropout")) or any(
        kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache")
    )


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stock's `sdpa_attention_forward`, which also takes masks from `fold` and then repeats no KV heads.

    The mask of `attending` makes the attention of the forward in progress compute: node by node, or by the kernel.

    Args:
        query: [B, heads, N, D]; key, value: [B, KV heads, S, D].
        attention_mask: mask for stock, or one from `fold`; None if all keys are seen.

    Returns:
        [B, N, heads, D] and None.
    """
    if is_sentinel(attention_mask):
        return attention_in_progress().attend(sdpa_attention_forward, module, query, key, value, **kwargs)
    num_queries, num_keys = query.shape[2], key.shape[2]
    if attention_mask is None or attention_mask.dim() != 4 or attention_mask.shape[2] <= num_queries:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch_size, num_heads, _, head_dim = query.shape
    num_kv_heads = key.shape[1]
    rows = num_heads // num_kv_heads * num_queries
    if attention_mask.shape[2] != rows or does_more(kwargs):
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
