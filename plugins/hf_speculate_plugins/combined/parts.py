"""One drafter of several at work: what it was told, what it drafted, what its drafts take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hf_speculate.drafting import DraftSession, DraftState, Observation, joined
from hf_speculate.policy import Timings
from hf_speculate.tree import DraftTree


_SECONDS_PER_LEVEL = 1.0  # relative to the first, before any draft was timed


@dataclass
class Part:
    """One drafter at work.

    Attributes:
        seconds: what a draft takes by its depth, reading what was committed included.
        tree, depth: of this round, and how deep it was asked to be; None and 0 where it was left out.
    """

    session: DraftSession
    feature_layers: Sequence[int]
    waiting: list[Observation] = field(default_factory=list)
    seconds: Timings = field(default_factory=lambda: Timings(_SECONDS_PER_LEVEL))
    tree: DraftTree | None = None
    depth: int = 0

    def read(self) -> None:
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            self.session.observe(*joined(waiting))

    def draft(self, state: DraftState, depth: int) -> None:
        start = time.perf_counter()
        self.read()
        self.tree, self.depth = self.session.draft(replace(state, max_depth=depth)), depth
        self.seconds.record(depth, time.perf_counter() - start)

    def forget(self) -> None:
        self.tree, self.depth = None, 0

    @property
    def cost(self) -> float:
        """Seconds of its shortest draft: by these the parts take turns."""
        return self.seconds.at(1) if self.seconds else 0.0
