"""The names that test modules not yet moved to `tests/support` import."""

from __future__ import annotations

from .support.inputs import character_tokenizer, padded_batch
from .support.tiny_heads import write_eagle_head


__all__ = ["character_tokenizer", "padded_batch", "write_eagle_head"]
