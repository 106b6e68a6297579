"""Names of transformers that differ from version to version. No other module of the engine knows versions.

Each name here is looked up, never compared by version number: a release that brings a part back is used at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from transformers import EncoderRepetitionPenaltyLogitsProcessor, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from transformers.generation import utils as generation_utils
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import output_capturing


def _present(module: Any, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


OLD_CACHE_NAME = "past_key_values"
"""Name of the cache argument up to transformers 5.23; newer versions take it with a warning."""

CACHE_NAME = "cache" if "cache" in {field.name for field in fields(GenerateDecoderOnlyOutput)} else OLD_CACHE_NAME
"""Name of the cache argument in the installed transformers."""

PLACEHOLDER_LAYERS: tuple[type, ...] = _present(cache_utils, "DummyLayer")
"""Cache layers that hold nothing, in the place of a layer that uses another one's entries. Versions before 5.23 leave
such layers out."""

SLIDING_RECURRENT_LAYERS: tuple[type, ...] = _present(cache_utils, "LinearAttentionAndSlidingWindowAttentionLayer")
"""Cache layers with a recurrent state and a sliding window. Versions before 5.13 have none."""

RECURRENT_LAYERS: tuple[type, ...] = ()
"""Cache layers with recurrent states that can be put back. Versions before 5.14 have one state a layer, which chains
do not continue."""
if isinstance(LinearAttentionLayer().conv_states, dict):
    RECURRENT_LAYERS = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, *SLIDING_RECURRENT_LAYERS)

CROPS_TO_ZERO: bool = "max_length" in signature(DynamicLayer.crop).parameters
"""Whether `crop(0)` of a cache drops everything. Its argument is a length before transformers 5.15, and the number of
entries to drop since."""


def _penalises_every_row() -> bool:
    text: Any = torch.zeros(2, 1, dtype=torch.long)
    penalised = EncoderRepetitionPenaltyLogitsProcessor(2.0, text[:1])(text, torch.ones(2, 1))
    return penalised[1].item() != 1


PENALISES_EVERY_ROW = _penalises_every_row()
"""Whether `EncoderRepetitionPenaltyLogitsProcessor` reaches rows beyond its number of prompts. Versions before 5.20
leave them as they are."""

PROMPT_INPUTS: tuple[str, ...] = tuple(getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))
"""Arguments with pictures and sound that stock drops after the prompt. Versions before 5.15 leave it to the models."""


def cache_of(output: Any) -> Any:
    """The cache in the output of a forward or of `generate`."""
    return getattr(output, CACHE_NAME)


def states_option(layers: Sequence[int]) -> list[int] | range:
    """The value of `output_hidden_states` for the hidden states of some layers."""
    if hasattr(output_capturing, "selected_hidden_states"):
        return list(layers)
    # Before 5.23 a list is a mere flag, or has other indices. A range is a flag there: all states are returned.
    return range(max(layers) + 1)


def has_checkpointing(model: Any) -> bool:
    """Whether gradient checkpointing is on. Its name is another one before transformers 5.23."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return next((getattr(model, name) for name in names if hasattr(model, name)), False)


def as_cache(cache: Cache | None) -> dict[str, Any]:
    """The keyword argument that passes a cache to a forward."""
    return {CACHE_NAME: cache}
