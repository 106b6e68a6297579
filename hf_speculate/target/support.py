"""The shapes of drafts that a model can score with a cache: trees, chains, or nothing."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import transformers
from transformers.cache_utils import Cache, LinearAttentionLayer

from ..cache import is_indexable
from ..compatibility import too_old
from ..errors import CacheStateError
from .layers import layer_types_of
from .models import GenerativeModel
from .positions import takes_position_ids


# Attentions that take an additive 4-D mask, as trees need. (A *bool* 4-D mask gives wrong results with "eager", which
# adds it to the scores, and "sdpa" converts it in every layer. So none is ever made.)
TREE_ATTENTION = ("eager", "sdpa")

Shape = Literal["tree", "chain", "single"]


def supported_shape(model: GenerativeModel, cache: Cache) -> tuple[Shape, str]:
    """The widest draft that `model` can score with `cache`, and why it is not wider ("" for trees)."""
    if not is_indexable(cache):
        if any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers) and (
            problem := too_old("drafting for recurrent layers", "5.14")
        ):
            return "single", problem
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        return "single", f"cache layers {kinds} cannot be indexed: no drafts"
    try:
        layer_types_of(model)
    except CacheStateError as error:
        return "single", f"{error} No drafts."
    if reason := counts_along_cache(model):
        return "chain", f"{reason}: chains only"
    attention = model.config._attn_implementation
    if attention not in TREE_ATTENTION:
        return "chain", f"attention {attention!r} takes no tree mask: chains only"
    return "tree", ""


def ignores_masks(model: GenerativeModel) -> bool:
    """Whether transformers gives the attention of `model` no mask at all, not even for padding."""
    return model.config._attn_implementation not in transformers.AttentionMaskInterface._global_mapping


def has_foreign_attention(model: GenerativeModel) -> bool:
    """Whether other code than transformers registered the attention that `model` uses."""
    function: Any = transformers.AttentionInterface._global_mapping.get(model.config._attn_implementation or "")
    while isinstance(function, partial):
        function = function.func
    return function is not None and not function.__module__.startswith(("transformers.", "hf_speculate."))


def counts_along_cache(model: GenerativeModel) -> str:
    """The reason why an entry's place in the cache matters to `model` besides position and mask; "" if it does not."""
    config = model.config.get_text_config(decoder=True)
    if not takes_position_ids(model):
        return f"{type(model).__name__} takes no position ids"
    if getattr(config, "alibi", False):
        return "ALiBi counts along the cache"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "local attention counts along the cache"
    return ""
