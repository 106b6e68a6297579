"""Counts of the tokens that a text uses where its grammar leaves a choice: white space, and tokens that join words.

After a key a JSON grammar forces `"`, but the model writes the token `":`. The grammar allows any white space, but the
model keeps to one style. Both come again at the next key, so they can be learnt from the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from .words import Possible


# Probability of the longest token among those that begin a forced text, before anything was observed.
_LONGEST = 0.9
_PRIOR = 0.5  # weight of this guess, in observations
_LAST = 2  # number of preceding tokens that distinguish places

Place = tuple[Hashable, tuple[int, ...]]
"""Key of a place (`Possible.place`), and the tokens before it."""

IsText = Callable[[int], bool]
"""A test whether a token has letters or digits and so belongs to the content."""


def longer(last: Sequence[int], token: int) -> list[int]:
    """The last tokens of a text, as many as places depend on, after one more token."""
    return [*last, token][-_LAST:]


@dataclass
class Style:
    """Counts of tokens by place."""

    counts: defaultdict[Place, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    def learn(self, possible: Possible, last: Sequence[int], token: int, is_text: IsText) -> None:
        """Counts a token of the text."""
        if not possible.is_certain:
            for place in _places(possible, last, is_text):
                self.counts[place][token] += 1

    def proposals(self, possible: Possible, last: Sequence[int], is_text: IsText) -> list[tuple[int, float]]:
        """Likely next tokens with their probabilities, most probable first."""
        if possible.is_certain:
            return [(possible.tokens[0], 1.0)]
        guess = {possible.tokens[0]: _LONGEST} if possible.tokens else {}
        for place in _places(possible, last, is_text):
            if counts := self.counts.get(place):
                total = counts.total() + _PRIOR
                probs = {token: count / total for token, count in counts.items()}
                for token, prob in guess.items():
                    probs[token] = probs.get(token, 0.0) + prob * _PRIOR / total
                return sorted(probs.items(), key=lambda item: -item[1])
        return list(guess.items())

    def copy(self) -> Style:
        return deepcopy(self)

    def without_text(self, is_text: IsText) -> Style:
        """The counts without any content, which other requests may use."""
        kept = Style()
        for place, counts in self.counts.items():
            forced, last = place
            is_bare = isinstance(forced, bytes) and not any(chr(byte).isalnum() for byte in forced)
            if is_bare and not any(map(is_text, last)):
                of_place = Counter({token: count for token, count in counts.items() if not is_text(token)})
                if of_place:
                    kept.counts[place] = of_place
        return kept


def _places(possible: Possible, last: Sequence[int], is_text: IsText) -> Iterator[Place]:
    """The keys of a place, most exact first; none after content, which other drafters know better."""
    if possible.place is None or (not possible.place and (not last or is_text(last[-1]))):
        return
    for number in range(min(_LAST, len(last)), 0, -1):
        yield possible.place, tuple(last[-number:])
    if possible.place:
        yield possible.place, ()
