"""Sources of the automaton: counts of the tokens that followed each context, and the target's most probable tokens.

The second source is from "Turning Trash into Treasure" (arXiv:2408.08696). Its matrix holds the eight most probable
tokens of greedy requests, without probabilities. Here the probabilities are kept, and sampled requests use them, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from hf_speculate.drafting import Choices
from hf_speculate.tree import ROOT_PARENT


class Followers:
    """The tokens that followed one context.

    Attributes:
        counts: token -> how often.
        total: sum of the counts.
    """

    # Number of followers to consider. In a large store a frequent token has thousands, and few of them are drafted.
    MAX_LEADING = 16

    __slots__ = ("_leading", "counts", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.total = 0
        self._leading: list[int] | None = None  # None: all of them

    def leading(self, _is_greedy: bool = True) -> Iterable[tuple[int, int]]:
        """The `MAX_LEADING` most frequent followers with their counts. Of equally frequent ones, smaller ids win."""
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


# Lengths of the contexts that are counted, rising.
ORDERS = (1, 2, 4, 8)


class ContextCounts:
    """The tokens that followed each context whose length is one of `orders`. A token adds one entry per order."""

    def __init__(self, orders: Sequence[int] = ORDERS):
        self.orders = tuple(orders)
        self.followers: dict[tuple[int, ...], Followers] = {}

    def after(self, context: tuple[int, ...]) -> Followers | None:
        """The tokens that followed a context; None if that never came."""
        return self.followers.get(context)

    def extend(self, cursor: list[int], tokens: Iterable[int]) -> None:
        """Appends tokens to a text.

        Args:
            cursor: last tokens of the text, as many as the longest order at most. It is updated.
        """
        longest = self.orders[-1]
        for token in tokens:
            for order in self.orders:
                if order > len(cursor):
                    break
                context = tuple(cursor[-order:])
                followers = self.followers.get(context)
                if followers is None:
                    followers = self.followers[context] = Followers()
                followers.add(token)
            cursor.append(token)
            del cursor[:-longest]

    def remove(self, tokens: Sequence[int]) -> None:
        """Removes the counts of a whole text."""
        for order in self.orders:
            for end in range(order, len(tokens)):
                context = tuple(tokens[end - order : end])
                self.followers[context].remove(tokens[end])
                if not self.followers[context].total:
                    del self.followers[context]


# Rows that are kept, of about 3 KB each. The oldest go first.
MAX_ROWS = 8192


# Smallest probability of a token, and largest number of tokens, that are useful for a greedy draft.
_SMALLEST, _MAX_PROBABLE = 0.01, 8


class RecycledRow:
    """The target's most probable tokens after a token, like `Followers` but with probabilities instead of counts."""

    total = 1

    __slots__ = ("_counts", "_probable", "_probs", "_tokens")

    def __init__(self, tokens: Sequence[int], probs: Sequence[float]):
        self._tokens, self._probs = tokens, probs
        self._counts: Mapping[int, float] | None = None
        self._probable: Sequence[tuple[int, float]] | None = None

    @property
    def counts(self) -> Mapping[int, float]:
        if self._counts is None:
            self._counts = {token: prob for token, prob in zip(self._tokens, self._probs, strict=True) if prob}
        return self._counts

    def leading(self, is_greedy: bool) -> Iterable[tuple[int, float]]:
        """Tokens with their probabilities; only the useful ones for a greedy draft."""
        if not is_greedy:
            return self.counts.items()
        if self._probable is None:
            first = zip(self._tokens[:_MAX_PROBABLE], self._probs, strict=False)
            self._probable = [(token, prob) for token, prob in first if prob >= _SMALLEST]
        return self._probable


class RecycledRows:
    """One row for each token, from the last scored node with that token."""

    def __init__(self) -> None:
        self._rows: dict[int, RecycledRow] = {}

    def learn(self, choices: Choices) -> None:
        """Stores the choices at every node. If several nodes have the same token, the last one counts."""
        rows = self._rows
        nodes = zip(choices.tree.rows(), choices.token_ids.tolist(), choices.probs.tolist(), strict=True)
        for (tokens, parents, _), chosen, probs in nodes:
            for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
                if parent >= ROOT_PARENT and probs[node][0]:  # else its scores were not finite
                    rows.pop(token, None)  # it becomes the newest
                    rows[token] = RecycledRow(chosen[node], probs[node])
        while len(rows) > MAX_ROWS:
            del rows[next(iter(rows))]

    def after(self, context: Sequence[int]) -> RecycledRow | None:
        """The tokens that followed the context, which must be one token."""
        if len(context) > 1:
            return None
        return self._rows.get(context[0])
