"""What followed every context of some texts, for contexts of a few lengths."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


class Followers:
    """The tokens that followed one context.

    Attributes:
        counts: token -> how often.
        total: sum of the counts.
    """

    # Followers that are looked at: a frequent token has thousands in a large store, and few of them are drafted.
    MAX_LEADING = 16

    __slots__ = ("_leading", "counts", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.total = 0
        self._leading: list[int] | None = None  # None: all of them

    def leading(self, _is_greedy: bool = True) -> Iterable[tuple[int, int]]:
        """The `MAX_LEADING` most frequent ones with their counts, of equal ones those of smaller ids."""
        if self._leading is None:
            return self.counts.items()
        return [(token, self.counts[token]) for token in self._leading]

    def add(self, token: int) -> None:
        self.total += 1
        self.counts[token] = self.counts.get(token, 0) + 1
        if self._leading is None:
            if len(self.counts) > self.MAX_LEADING:
                self._rank()
        elif token not in self._leading:
            last = min(self._leading, key=self._worth)
            if self._worth(token) > self._worth(last):
                self._leading[self._leading.index(last)] = token

    def remove(self, token: int) -> None:
        self.total -= 1
        self.counts[token] -= 1
        if not self.counts[token]:
            del self.counts[token]
        if self._leading is not None and token in self._leading:
            self._rank()

    def _rank(self) -> None:
        is_long = len(self.counts) > self.MAX_LEADING
        self._leading = heapq.nlargest(self.MAX_LEADING, self.counts, key=self._worth) if is_long else None

    def _worth(self, token: int) -> tuple[int, int]:
        return self.counts[token], -token


class ContextCounts:
    """context -> what followed it, of contexts as long as one of `orders`. A token costs one entry an order."""

    def __init__(self, orders: Sequence[int]):
        self.orders = tuple(orders)
        self.followers: dict[tuple[int, ...], Followers] = {}

    def after(self, context: tuple[int, ...]) -> Followers | None:
        """What followed a context; None if that never came."""
        return self.followers.get(context)

    def extend(self, cursor: list[int], tokens: Iterable[int]) -> None:
        """Appends tokens to a text.

        Args:
            cursor: the last tokens of the text, at most the longest order. Empty for a new text; changed.
        """
        longest = self.orders[-1]
        for token in tokens:
            for order in self.orders:
                if order > len(cursor):
                    break
                context = tuple(cursor[-order:])
                found = self.followers.get(context)
                if found is None:
                    found = self.followers[context] = Followers()
                found.add(token)
            cursor.append(token)
            del cursor[:-longest]

    def remove(self, tokens: Sequence[int]) -> None:
        """Takes back a whole text."""
        for order in self.orders:
            for end in range(order, len(tokens)):
                context = tuple(tokens[end - order : end])
                self.followers[context].remove(tokens[end])
                if not self.followers[context].total:
                    del self.followers[context]
