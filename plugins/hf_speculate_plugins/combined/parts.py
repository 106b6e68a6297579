"""One drafter of several at work: what it was told, what it drafted, what its drafts are worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_speculate.drafting import Calibration, Deepening, Drafter, DraftSession, DraftState, Observation, joined
from hf_speculate.policy import Acceptance, Average
from hf_speculate.tree import TreeRow


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
        rows, probabilities: the trees of this round, and that their nodes are right; empty where it was left out.
    """

    session: DraftSession
    feature_layers: Sequence[int]
    is_free: bool
    known: Knowledge
    waiting: list[Observation] = field(default_factory=list)
    rows: list[TreeRow] = field(default_factory=list)
    probabilities: list[list[float]] = field(default_factory=list)

    def read(self) -> None:
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            self.session.observe(*joined(waiting))

    def draft(self, state: DraftState) -> None:
        self.read()
        calibration = self.known.acceptance.calibration
        deepening = None if state.deepening is None else _InProbabilities(state.deepening, calibration)
        self.rows = self.session.draft(replace(state, deepening=deepening)).host.rows()
        self.probabilities = [self.known.acceptance.probabilities(row) for row in self.rows]

    def forget(self) -> None:
        self.rows, self.probabilities = [], []

    def learn(self, row: int, tokens: Sequence[int]) -> None:
        """Learns what became of a row's draft; `tokens` were emitted after the root."""
        nodes, path = self.rows[row], [0]
        for token in tokens:
            children = (node for node, parent in enumerate(nodes.parents) if parent == path[-1])
            found = next((node for node in children if nodes.token_ids[node] == token), None)
            if found is None:
                break
            path.append(found)
        self.known.acceptance.count(nodes, path, tokens)


class _InProbabilities:
    """Asks whether another level pays with what the drafter's values are worth instead of these."""

    def __init__(self, inner: Deepening, calibration: Calibration):
        self._inner, self._calibration = inner, calibration
        self._values: Tensor | None = None
        self._worth: Tensor | None = None

    def __call__(self, values: Tensor, previous: Tensor | None = None) -> bool:
        own, before = values, torch.zeros(values.shape)
        if self._values is not None and self._worth is not None:
            parents = torch.arange(values.shape[1]).expand(values.shape) if previous is None else previous
            own, before = values - self._values.gather(1, parents), self._worth.gather(1, parents)
        shares = [[math.log(max(self._calibration.share(value), 1e-9)) for value in row] for row in own.tolist()]
        self._values, self._worth = values, before + torch.tensor(shares)
        return self._inner(self._worth, previous)
