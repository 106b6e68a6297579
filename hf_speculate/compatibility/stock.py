"""Parts of transformers that differ from version to version. No other module of the engine knows these differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer
from transformers.generation import utils as generation_utils
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import output_capturing

from .versions import too_old


def _layers(name: str) -> tuple[type, ...]:
    return (getattr(cache_utils, name),) if hasattr(cache_utils, name) else ()


OLD_CACHE_NAME = "past_key_values"
"""Name of the cache argument up to transformers 5.23; newer versions take it with a warning."""

CACHE_NAME = "cache" if "cache" in {field.name for field in fields(GenerateDecoderOnlyOutput)} else OLD_CACHE_NAME
"""Name of the cache argument in the installed transformers."""

# They hold nothing, for a layer that uses the entries of another one. Versions before 5.23 leave such layers out.
PLACEHOLDER_LAYERS = _layers("DummyLayer")
SLIDING_RECURRENT_LAYERS = _layers("LinearAttentionAndSlidingWindowAttentionLayer")
# Cache layers whose recurrent states can be put back. Models before 5.14 do not continue their states by chains.
RECURRENT_LAYERS: tuple[type, ...] = ()
if isinstance(LinearAttentionLayer().conv_states, dict):
    RECURRENT_LAYERS = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, *SLIDING_RECURRENT_LAYERS)

# Whether `crop(0)` drops everything: its argument is a length before 5.15, and a number of entries to drop since.
CROPS_TO_ZERO = "max_length" in signature(DynamicLayer.crop).parameters
# Whether `EncoderRepetitionPenaltyLogitsProcessor` reaches all rows of a prompt, and not the first one alone.
PENALISES_EVERY_ROW = not too_old("", "5.20")
# Arguments with pictures and sound that stock drops after the prompt. Versions before 5.15 leave it to the models.
PROMPT_INPUTS: tuple[str, ...] = tuple(getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))


def cache_of(output: Any) -> Any:
    """The cache in the output of a forward or of `generate`."""
    return getattr(output, CACHE_NAME)


def as_cache(cache: Cache | None) -> dict[str, Any]:
    """The keyword argument that passes a cache to a forward."""
    return {CACHE_NAME: cache}


def states_option(layers: Sequence[int]) -> list[int] | range:
    """The value of `output_hidden_states` for the hidden states of some layers."""
    if hasattr(output_capturing, "selected_hidden_states"):
        return list(layers)
    # Before 5.23 a list is a mere flag, or has other indices. A range is a flag there: all states are returned.
    return range(max(layers) + 1)


def reads_stops_late(device: torch.device, cache: Cache, is_returned: bool) -> bool:
    """Whether stock reads one step late whether a text has ended, so that the device need not wait (on MPS since 5.24).

    It then runs a step more, whose token it drops.

    Args:
        device: device of the text.
        is_returned: whether the caller gets to see the cache.
    """
    check = getattr(generation_utils, "DeferredStopCheck", None)
    return check is not None and check.is_supported(device, cache, is_returned, is_assistant=False)


def has_checkpointing(model: Any) -> bool:
    """Whether gradient checkpointing is on. Its name is another one before transformers 5.23."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return next((getattr(model, name) for name in names if hasattr(model, name)), False)
