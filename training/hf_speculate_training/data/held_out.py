"""Prompts that are kept for measuring: records like them must not be trained on."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .records import Chat, Example, Plain, Tokens


_WORD = re.compile(r"\w+")


class HeldOut:
    """Finds near-duplicates: texts that share so many words in a row with a held-out one.

    Shared runs of words are the usual test for contamination (GPT-3, appendix C). Case and punctuation do not count. A
    held-out text that has fewer words is found where it stands whole.

    Args:
        texts: the held-out ones.
        num_words: in a row.
    """

    def __init__(self, texts: Iterable[str], num_words: int = 8):
        self.num_words = num_words
        # Runs by length: all but those of short texts have `num_words`.
        self._runs: dict[int, set[tuple[str, ...]]] = {}
        for words in map(_words, texts):
            length = min(num_words, len(words))
            self._runs.setdefault(length, set()).update(_runs_of(words, length))
        self._runs.pop(0, None)

    def is_like(self, example: Example) -> bool:
        """Whether what a user says in this example, or a text to be gone on with, is like a held-out one.

        Token ids cannot be told: they pass.
        """
        return any(self._shares(_words(text)) for text in _asked(example))

    def _shares(self, words: list[str]) -> bool:
        return any(not runs.isdisjoint(_runs_of(words, length)) for length, runs in self._runs.items())


def _asked(example: Example) -> list[str]:
    if isinstance(example, Chat):
        return [message["content"] for message in example.messages if message["role"] == "user"]
    if isinstance(example, Tokens):
        return []
    return [example.text if isinstance(example, Plain) else example.prompt]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _runs_of(words: list[str], length: int) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}
