"""What transformers calls the cache, as an argument of forwards and in what they return."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers.cache_utils import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput


OLD_CACHE_NAME = "past_key_values"
"""Up to 5.23; newer ones take it too, with a warning."""

CACHE_NAME = "cache" if "cache" in {field.name for field in fields(GenerateDecoderOnlyOutput)} else OLD_CACHE_NAME
"""Of the transformers that is installed."""


def cache_of(output: Any) -> Any:
    """What a forward or `generate` returned as its cache."""
    return getattr(output, CACHE_NAME)


def as_cache(cache: Cache | None) -> dict[str, Any]:
    """The keyword argument that hands a cache to a forward."""
    return {CACHE_NAME: cache}
