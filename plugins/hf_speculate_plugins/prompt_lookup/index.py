"""The n-grams of a growing text."""

from __future__ import annotations

from collections import defaultdict


_MAX_OCCURRENCES = 32


class SuffixIndex:
    """Where every n-gram of a growing text ended, for n from `min_ngram` to `max_ngram`.

    An appended token costs one dictionary entry per n; nothing is rescanned.

    Attributes:
        match_size: n of the longest match that the last `continuations` found; 0 for none.
    """

    def __init__(self, min_ngram: int, max_ngram: int):
        self.tokens: list[int] = []
        self.match_size = 0
        self._sizes = range(min_ngram, max_ngram + 1)
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, tokens: list[int]) -> None:
        """Appends tokens to the text."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self.tokens[end - size : end])].append(end)

    def continuations(self, count: int) -> list[tuple[int, int]]:
        """Size of the match and start of up to `count` continuations of the text's end that begin differently.

        Those after the longest matching suffix come first, later occurrences before earlier ones.
        """
        found: list[tuple[int, int]] = []
        first_tokens: set[int] = set()
        length = len(self.tokens)
        self.match_size = 0
        for size in reversed(self._sizes):
            if size > length or len(found) >= count:
                continue
            # Only the latest occurrences: on repetitive text a common n-gram would be a scan of the whole text.
            latest = self._ends.get(tuple(self.tokens[-size:]), [])[-_MAX_OCCURRENCES:]
            for end in reversed(latest):
                if end < length and self.tokens[end] not in first_tokens:
                    found.append((size, end))
                    self.match_size = max(self.match_size, size)
                    first_tokens.add(self.tokens[end])
                    if len(found) >= count:
                        break
        return found
