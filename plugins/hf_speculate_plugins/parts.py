"""The parts of a combined drafter, with the statistics that decide whether a free one drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor

from hf_speculate.drafting import Calibration, DraftSession, DraftState, EarlyStopping, Observation, joined
from hf_speculate.policy import Acceptance, Average, PathProbabilities
from hf_speculate.tree import HostTree, TreeRow


_SMALLEST = 1e-9  # smallest probability, as a value is a logarithm
_ENOUGH = 8.0  # number of drafts to observe before a drafter may be left out
_TRIAL = 8  # a drafter that is left out is tried again in every eighth round

RowDraft = tuple[TreeRow, Sequence[float]]
"""Nodes of a row, and the probability that each is right."""


def value_of(probability: float) -> float:
    """Value of a node (`DraftTree.values`) of this probability."""
    return math.log(max(probability, _SMALLEST))


@dataclass
class Gain:
    """Tokens and time of a drafter's recent drafts.

    Attributes:
        tokens: accepted draft tokens per row; for a free drafter, those that no head had.
        seconds: time of a draft.
        num_left_out: number of rounds since the last draft.
    """

    tokens: Average = field(default_factory=Average)
    seconds: Average = field(default_factory=Average)
    num_left_out: int = 0

    def add(self, tokens: float, seconds: float) -> None:
        """Records a draft."""
        self.tokens.follow(tokens)
        self.seconds.follow(seconds)
        self.num_left_out = 0

    def net(self, pace: float | None) -> float:
        """Tokens that a draft adds, less its time in tokens at `pace` seconds per token; 0 if that is negative or
        unknown."""
        if not pace or not self.tokens.weight:
            return 0.0
        return max((self.tokens.total - self.seconds.total / pace) / self.tokens.weight, 0.0)

    def pays(self, pace: float | None) -> bool:
        """Whether a draft takes less time than its tokens at `pace` seconds per token; True until that is known."""
        if pace is None or self.tokens.weight < _ENOUGH:
            return True
        return self.tokens.total * pace >= self.seconds.total

    def is_due(self, pace: float | None) -> bool:
        """Whether to draft in this round: it pays, or is tried again. Call it once per round."""
        if self.pays(pace) or self.num_left_out + 1 >= _TRIAL:
            return True
        self.num_left_out += 1
        return False


class Pace:
    """Time per token of a request, from one draft to the next."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._tokens = 0.0
        self._seconds, self._emitted = Average(), Average()

    def begin_draft(self) -> None:
        """Ends the time of the previous rounds."""
        now = perf_counter()
        if self._since is not None and self._tokens:
            self._seconds.follow(now - self._since)
            self._emitted.follow(self._tokens)
        self._since, self._tokens = now, 0.0

    def emitted(self, tokens: float) -> None:
        """Counts the tokens per row of a round."""
        self._tokens += tokens

    @property
    def seconds_per_token(self) -> float | None:
        return self._seconds.total / self._emitted.total if self._emitted.weight else None


@dataclass
class Knowledge:
    """Statistics of one part, from similar requests.

    Attributes:
        acceptance: acceptance of its nodes.
        lengths: expected number of accepted tokens of its drafts.
        gain: tokens that its drafts add, and their time.
    """

    acceptance: Acceptance
    lengths: Average = field(default_factory=Average)
    gain: Gain = field(default_factory=Gain)


@dataclass
class Part:
    """One drafter of a request.

    Attributes:
        waiting: observations that the session has not received yet.
        tree, drafts: draft of this round, whole and by rows; None and empty if the part was left out.
        seconds: time of this draft.
        rests: whether the part is left out because it adds too little.
    """

    name: str
    session: DraftSession
    feature_layers: Sequence[int]
    is_free: bool
    known: Knowledge
    waiting: list[Observation] = field(default_factory=list)
    tree: HostTree | None = None
    drafts: list[RowDraft] = field(default_factory=list)
    seconds: float = 0.0
    rests: bool = False

    def read(self) -> None:
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            self.session.observe(*joined(waiting))

    def draft(self, state: DraftState) -> None:
        start = perf_counter()
        self.read()
        calibration = self.known.acceptance.calibration
        early_stopping = None if state.early_stopping is None else _in_probabilities(state.early_stopping, calibration)
        self.tree = self.session.draft(replace(state, early_stopping=early_stopping)).host
        self.drafts = [(row, self.known.acceptance.probabilities(row)) for row in self.tree.rows()]
        self.seconds = perf_counter() - start

    def forget(self) -> None:
        self.tree, self.drafts = None, []

    def depth(self, row: int, tokens: Sequence[int]) -> int:
        """Number of leading `tokens` that a row's draft has after the root."""
        return max(len(self.path(row, tokens)) - 1, 0)

    def path(self, row: int, tokens: Sequence[int]) -> list[int]:
        """The nodes of a row's draft that hold the leading `tokens`, the root first; empty without a draft."""
        if self.tree is None:
            return []
        path = [0]
        for token in tokens:
            child = self.tree.child(row, path[-1], token)
            if child is None:
                break
            path.append(child)
        return path

    @property
    def completes(self) -> bool:
        """Whether the session adds to what the others draft."""
        return type(self.session).complete is not DraftSession.complete

    def learn(self, row: int, tokens: Sequence[int]) -> None:
        """Counts the nodes of a row's draft, if there is one, that were accepted; `tokens` came after the root."""
        if path := self.path(row, tokens):
            self.known.acceptance.count(self.drafts[row][0], path, tokens)


def _in_probabilities(early_stopping: EarlyStopping, calibration: Calibration) -> EarlyStopping:
    """A decision that calls `early_stopping` with calibrated probabilities in place of the drafter's own values."""
    probabilities = PathProbabilities(calibration)

    def should_continue(values: Tensor, previous: Tensor | None = None) -> bool:
        rows = [[value_of(probability) for probability in row] for row in probabilities(values, previous)]
        return early_stopping(torch.tensor(rows, dtype=torch.float32, device="cpu"), previous)

    return should_continue
