"""Whether the next round is drafted while this one is verified: always, never, or where that was found to be faster."""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from .acceptance import Average
from .contract import PolicyRequest


Ahead = bool | Literal["auto"]

_TRIED = 8  # rounds of either kind, before what is known of them is compared
_BLOCK = 4  # rounds of a kind, one after the other: what one leaves in caches is the next one's
_AGAIN = 32  # blocks of the better kind, after which the other gets one


class Pace:
    """Seconds and tokens of rounds, from one draft to the next, with drafting ahead and without.

    Attributes:
        ahead: see `EngineOptions`.
    """

    def __init__(self, ahead: Ahead):
        self.ahead: Ahead = ahead
        self._seconds = {True: Average(), False: Average()}
        self._tokens = {True: Average(), False: Average()}
        self._num_rounds = 0

    def choose(self) -> bool:
        """Whether the coming round drafts ahead."""
        if isinstance(self.ahead, bool):
            return self.ahead
        block = self._num_rounds // _BLOCK
        if self._num_rounds < 2 * _TRIED:
            return block % 2 == 0
        is_better = self.ratio < 1
        return is_better if block % _AGAIN else not is_better

    def learn(self, was_ahead: bool, seconds: float, tokens: float) -> None:
        """Notes a round: from its draft to the next one, which brought so many tokens."""
        self._num_rounds += 1
        for average, value in ((self._seconds[was_ahead], seconds), (self._tokens[was_ahead], tokens)):
            average.fade()
            average.add(value)

    @property
    def ratio(self) -> float:
        """Seconds a token of rounds that draft ahead to those of the others."""
        per_token = [self._seconds[kind].near(0.0) / max(self._tokens[kind].near(0.0), 1e-9) for kind in (True, False)]
        return per_token[0] / max(per_token[1], 1e-9)


class Lookahead:
    """What a speculator has learnt about drafting ahead, of targets that are there; shared by its requests.

    Args:
        ahead: see `EngineOptions`.
    """

    def __init__(self, ahead: Ahead):
        self.ahead: Ahead = ahead
        self._paces: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, bool], Pace]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Without what was learnt of targets: they are of this process."""
        return {"ahead": self.ahead}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def start(self, request: PolicyRequest) -> Pace | None:
        """What is known of requests like this one; None where nothing is drafted ahead."""
        if self.ahead is False:
            return None
        of_target, kind = self._paces.setdefault(request.target, {}), (request.adapters, request.samples)
        return of_target.setdefault(kind, Pace(self.ahead))
