"""Parts of a round on the device: the draft, the score, and the rest. They are marked with events around both.

Marks are put around the drafter's session and around `Scorer.__call__`. A round that is recorded as a whole may run
neither; its parts are then missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_speculate.drafting import Drafter, DraftRequest, DraftSession, DraftState
from hf_speculate.forward import Scorer
from hf_speculate.tree import DraftTree

from .setting import synchronize
from .timing import Marks


class MarkedDrafter(Drafter):
    """A drafter whose drafts and observations are marked as the part "draft"."""

    name = "marked"

    def __init__(self, inner: Drafter, marks: Marks):
        self._inner, self._marks = inner, marks
        self.feature_layers = inner.feature_layers

    @classmethod
    def for_target(cls, target: Any, **options: Any) -> MarkedDrafter:
        raise NotImplementedError("A marked drafter is made from another one.")

    def start(self, request: DraftRequest) -> DraftSession:
        return _MarkedSession(self._inner.start(request), self._marks)


class _MarkedSession(DraftSession):
    def __init__(self, inner: DraftSession, marks: Marks):
        self._inner, self._marks = inner, marks
        self._has_begun = False

    def draft(self, state: DraftState) -> DraftTree:
        with self._marks.part("draft"):
            return self._inner.draft(state)

    def observe(self, tokens: Any, features: Any, lengths: Any) -> None:
        if not self._has_begun:  # the prompt belongs to no round
            self._has_begun = True
            return self._inner.observe(tokens, features, lengths)
        with self._marks.part("draft"):
            return self._inner.observe(tokens, features, lengths)

    def close(self) -> None:
        self._inner.close()


@contextmanager
def marked_scores(marks: Marks) -> Iterator[None]:
    """A context in which every forward over a tree is marked as the part "score"."""
    score: Any = Scorer.__call__

    def marked(self: Scorer, *args: Any, **kwargs: Any) -> Any:
        with marks.part("score"):
            return score(self, *args, **kwargs)

    Scorer.__call__ = marked  # type: ignore[method-assign]
    try:
        yield
    finally:
        Scorer.__call__ = score  # type: ignore[method-assign]


def parts_of(call: Any, marks: Marks, device: torch.device) -> dict[str, float]:
    """Milliseconds of each part per round, in one call. "call" is the whole call, with its prompt."""
    synchronize(device)
    with marked_scores(marks), marks.part("call"):
        call()
    synchronize(device)
    rounds = max(marks.counts().get("score", 1), 1)
    return {name: found / rounds for name, found in marks.milliseconds().items()} | {"rounds": rounds}
