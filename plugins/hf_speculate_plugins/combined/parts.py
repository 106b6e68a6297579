"""One drafter of several at work: what it was told, what it drafted, what its drafts are worth."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_speculate.drafting import Calibration, Deepening, Drafter, DraftSession, DraftState, Observation, joined
from hf_speculate.policy import Acceptance, Average, PathProbabilities
from hf_speculate.tree import HostTree

from .merging import RowDraft, value_of


@dataclass
class Knowledge:
    """What requests that are alike have taught of one part.

    Attributes:
        acceptance: of its nodes.
        lengths: tokens that its drafts were worth.
    """

    acceptance: Acceptance
    lengths: Average = field(default_factory=Average)

    @classmethod
    def of(cls, drafter: Drafter, samples: bool) -> Knowledge:
        return cls(Acceptance(drafter.calibration.start(samples)))

    def copy(self) -> Knowledge:
        return deepcopy(self)


@dataclass
class Part:
    """One drafter at work.

    Attributes:
        is_free: see `Drafter`.
        tree, drafts: of this round, whole and by rows; None and empty where it was left out.
    """

    session: DraftSession
    feature_layers: Sequence[int]
    is_free: bool
    known: Knowledge
    waiting: list[Observation] = field(default_factory=list)
    tree: HostTree | None = None
    drafts: list[RowDraft] = field(default_factory=list)

    def read(self) -> None:
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            self.session.observe(*joined(waiting))

    def draft(self, state: DraftState) -> None:
        self.read()
        calibration = self.known.acceptance.calibration
        deepening = None if state.deepening is None else _InProbabilities(state.deepening, calibration)
        self.tree = self.session.draft(replace(state, deepening=deepening)).host
        self.drafts = [(row, self.known.acceptance.probabilities(row)) for row in self.tree.rows()]

    def forget(self) -> None:
        self.tree, self.drafts = None, []

    def learn(self, row: int, tokens: Sequence[int]) -> None:
        """Learns what became of a row's draft, if there is one; `tokens` were emitted after the root."""
        if self.tree is None:
            return
        path = [0]
        for token in tokens:
            child = self.tree.child(row, path[-1], token)
            if child is None:
                break
            path.append(child)
        self.known.acceptance.count(self.drafts[row][0], path, tokens)


class _InProbabilities:
    """Asks whether another level pays with what the drafter's values are worth instead of these."""

    def __init__(self, inner: Deepening, calibration: Calibration):
        self._inner, self._probabilities = inner, PathProbabilities(calibration)

    def __call__(self, values: Tensor, previous: Tensor | None = None) -> bool:
        found = self._probabilities(values, previous)
        return self._inner(torch.tensor([[value_of(each) for each in row] for row in found]), previous)
