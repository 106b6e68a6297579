"""The text that one turn of a conversation leaves for the next, while the caller keeps the KV cache.

Everything here is keyed weakly by the cache object that `generate` returned: it lives as long as the conversation, and
nobody has to close it. Conversations are one row without padding; batches start anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from transformers.cache_utils import Cache


State = TypeVar("State")

# The text of each conversation, its last token, which is not in the cache, included.
_texts: WeakKeyDictionary[Cache, list[int]] = WeakKeyDictionary()


def remember_text(cache: Cache, text: list[int]) -> None:
    """Notes the whole text whose states `cache` holds."""
    _texts[cache] = text


def cached_text(cache: Cache) -> list[int] | None:
    """The tokens whose states `cache` holds; None if they are not known (another engine filled it)."""
    text, length = _texts.get(cache), cache.get_seq_length()
    return text[:length] if text is not None and length <= len(text) else None


class Conversations(Generic[State]):
    """States that a drafter keeps of finished requests: its own cache, as a rule."""

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[Cache, tuple[list[int], State]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: caches are of this process."""
        return {}

    def __setstate__(self, _state: dict[str, Any]) -> None:
        self.__init__()

    def keep(self, cache: Cache, text: list[int], state: State) -> None:
        """Keeps what a request on `cache` came to, having read `text`."""
        self._states[cache] = (text, state)

    def take(self, cache: Cache | None, text: Sequence[int] | None) -> tuple[int, State] | None:
        """Hands over the last state kept for `cache`, and how many of the tokens that it has read `text` still has."""
        found = None if cache is None else self._states.pop(cache, None)
        return None if found is None or text is None else (common_prefix(found[0], text), found[1])


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of what two texts begin with alike."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
