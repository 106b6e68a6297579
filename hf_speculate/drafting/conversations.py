"""The text that one turn of a conversation leaves for the next, while the caller keeps the KV cache.

Everything here is stored weakly by the cache object that `generate` returned, so it lives as long as the conversation.
Only requests with one row and no padding are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from transformers.cache_utils import Cache


State = TypeVar("State")

# Text of each conversation, including its last token, which is not in the cache.
_texts: WeakKeyDictionary[Cache, list[int]] = WeakKeyDictionary()


def remember_text(cache: Cache, text: list[int]) -> None:
    """Stores the whole text whose states `cache` holds."""
    _texts[cache] = text


def cached_text(cache: Cache) -> list[int] | None:
    """The tokens whose states `cache` holds; None if unknown because another engine filled it."""
    text, length = _texts.get(cache), cache.get_seq_length()
    return text[:length] if text is not None and length <= len(text) else None


class Conversations(Generic[State]):
    """A drafter's states of finished requests, usually its own caches."""

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[Cache, tuple[list[int], State]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """An empty state: caches belong to this process."""
        return {}

    def __setstate__(self, _state: dict[str, Any]) -> None:
        self.__init__()

    def keep(self, cache: Cache, text: list[int], state: State) -> None:
        """Stores the state of a request on `cache` that has read `text`."""
        self._states[cache] = (text, state)

    def take(self, cache: Cache | None, text: Sequence[int] | None) -> tuple[int, State] | None:
        """Removes and returns the state kept for `cache`, with the length of the prefix that `text` shares with what it
        has read."""
        kept = None if cache is None else self._states.pop(cache, None)
        return None if kept is None or text is None else (common_prefix(kept[0], text), kept[1])


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix of two texts."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
