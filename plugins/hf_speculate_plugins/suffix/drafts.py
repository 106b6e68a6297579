"""What a row drafts, with how sure it is."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field


_SINGLE = struct.Struct("f")


@dataclass
class Draft:
    """Nodes below the last token of a text, best first, parents first.

    Attributes:
        tokens: of the draft nodes.
        parents: index of each node's parent, -1 for the last token of the text.
        probs: of each node's path.
        match_len: tokens of the context that were found, where one match makes a draft.
        score: sum of the probabilities: how many nodes would be accepted. In single precision, as the original's:
            which match wins where two are equally good hangs on how that is rounded.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    match_len: int = 0
    score: float = 0.0

    def add(self, token: int, parent: int, prob: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.score = single(self.score + prob)
        return len(self.tokens) - 1


def best_of(drafts: Iterable[Draft]) -> Draft:
    """The draft of the highest score, of equal ones the first."""
    return max(drafts, key=lambda draft: draft.score)


def single(value: float) -> float:
    """Rounded to single precision."""
    return _SINGLE.unpack(_SINGLE.pack(value))[0]
