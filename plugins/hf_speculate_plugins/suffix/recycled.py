"""What the target found probable after every token when it last scored one: recycled rows.

Source: "Turning Trash into Treasure" (arXiv:2408.08696), whose matrix holds the eight most probable tokens of greedy
requests, without their probabilities; here they are a source of the automaton, and of sampled requests as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hf_speculate.drafting import Choices
from hf_speculate.tree import ROOT_PARENT


# Rows that are kept, of about 3 KB each. The oldest go first.
MAX_ROWS = 8192
# What is less probable, or comes behind so many, adds nothing to a greedy draft.
_SMALLEST, _MAX_PROBABLE = 0.01, 8


class RecycledRow:
    """What followed a token: as `Followers`, with probabilities for counts.

    Args:
        tokens: most probable first.
        probs: of each of them.
    """

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
        """Tokens with their probabilities; for a greedy draft those that it can need."""
        if not is_greedy:
            return self.counts.items()
        if self._probable is None:
            first = zip(self._tokens[:_MAX_PROBABLE], self._probs, strict=False)
            self._probable = [(token, prob) for token, prob in first if prob >= _SMALLEST]
        return self._probable


class RecycledRows:
    """token -> the row of the last node with it."""

    def __init__(self) -> None:
        self._rows: dict[int, RecycledRow] = {}

    def learn(self, choices: Choices) -> None:
        """Of a token at several nodes, the last one counts."""
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
        """What followed the context, which must be one token."""
        if len(context) > 1:
            return None
        return self._rows.get(context[0])
