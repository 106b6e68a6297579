"""Several drafters in one tree: `speculator="examples/pycoder-eagle3+prompt_lookup"`.

A head is right more often, a lookup costs nothing and goes deeper where the text repeats itself. Every part drafts its
own tree, the trees are merged, and the nodes are ordered by how often such a node was accepted (`ledger`). A part that
costs time is left out of a round whose cheaper drafts are so sure that it would not pay; it is tried now and then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.drafter import Drafter, DraftRequest, DraftSession, DraftState
from hf_speculate.observations import Observation, joined
from hf_speculate.speculator import make_speculator
from hf_speculate.tree import DraftTree

from .ledger import Ledger, merge_row


if TYPE_CHECKING:
    from typing_extensions import Self


_TRY_EVERY = 16  # rounds: then every part drafts, whether it seems to pay or not
_SMOOTHING = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class CombinedOptions:
    """Options of combined drafting.

    Attributes:
        max_nodes: draft nodes of the merged tree, the root not counted.
    """

    max_nodes: int = 32

    def __post_init__(self) -> None:
        if self.max_nodes < 1:
            raise ValueError(f"combined: max_nodes must be at least 1, got {self.max_nodes}.")


class CombinedDrafter(Drafter):
    """Drafts with several drafters at once.

    Args:
        parts: two or more drafters for the same target.
        options: see `CombinedOptions`.
    """

    name = "combined"

    def __init__(self, parts: Sequence[Drafter], options: CombinedOptions | None = None):
        if len(parts) < 2:
            raise ValueError(f"combined: needs at least two drafters, got {len(parts)}.")
        self.parts = tuple(parts)
        self.options = options or CombinedOptions()
        self.feature_layers = tuple(dict.fromkeys(layer for part in parts for layer in part.feature_layers))
        self.ledger = Ledger(len(parts))

    def __repr__(self) -> str:
        return f"CombinedDrafter({' + '.join(map(repr, self.parts))}, {self.options})"

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """`parts=` are drafters, names of drafters, or folders and Hub ids of heads; a pair adds options to a name:
        `parts=["prompt_lookup", ("examples/pycoder-eagle3", {"depth": 8})]`."""
        parts: Iterable[Any] = options.pop("parts", None) or ()
        chosen = CombinedOptions(**options)
        return cls([_part(part, target) for part in parts], chosen)

    def check_target(self, target: PreTrainedModel) -> None:
        """Every part has to fit."""
        for part in self.parts:
            part.check_target(target)

    def start(self, request: DraftRequest) -> CombinedSession:
        return CombinedSession(self, request)


def _part(part: Any, target: PreTrainedModel) -> Drafter:
    if isinstance(part, Drafter):
        return part
    name, options = (part, {}) if isinstance(part, str | os.PathLike) else part
    return make_speculator(os.fspath(name), target, **options).drafter


@dataclass
class _Part:
    """One drafter at work.

    Attributes:
        draft_seconds: what a draft takes, reading what was committed included; None before the first.
        tree: of this round, None where it was left out.
    """

    session: DraftSession
    feature_layers: Sequence[int]
    waiting: list[Observation] = field(default_factory=list)
    draft_seconds: float | None = None
    tree: DraftTree | None = None

    def read(self) -> None:
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            self.session.observe(*joined(waiting))

    def draft(self, state: DraftState) -> None:
        start = time.perf_counter()
        self.read()
        self.tree = self.session.draft(state)
        self.draft_seconds = _smoothed(self.draft_seconds, time.perf_counter() - start)


class CombinedSession(DraftSession):
    """The sessions of the parts, in step."""

    def __init__(self, drafter: CombinedDrafter, request: DraftRequest):
        self._drafter = drafter
        self._ledger = drafter.ledger.carried()
        self._is_selective = request.adaptive
        self._parts: list[_Part] = []
        try:
            for part in drafter.parts:
                self._parts.append(_Part(part.start(request), part.feature_layers))
        except BaseException:
            self._close_parts()
            raise
        self.carries_over = any(part.session.carries_over for part in self._parts)
        self._num_drafts = 0
        self._has_seen_prompt = False
        self._drafted_at: float | None = None
        self._rest_seconds: float | None = None  # of a round: everything that is not drafting

    def observe(self, tokens: Tensor, features: Mapping[int, Tensor], lengths: Tensor) -> None:
        self._learn(tokens.tolist(), lengths.tolist())
        for part in self._parts:
            part.waiting.append(Observation(tokens, {layer: features[layer] for layer in part.feature_layers}, lengths))
            if not self._has_seen_prompt:
                part.read()
        self._has_seen_prompt = True

    def draft(self, state: DraftState) -> DraftTree:
        if self._drafted_at is not None:
            self._rest_seconds = _smoothed(self._rest_seconds, time.perf_counter() - self._drafted_at)
        self._num_drafts += 1
        rows = [row for row, is_active in enumerate(state.active) if is_active]
        for part in self._parts:
            part.tree = None
        for part in sorted(self._parts, key=lambda part: part.draft_seconds or 0.0):
            if self._pays(part, rows):
                part.draft(state)
        merged = [
            merge_row(row, root, self._ledger, self._drafts(), self._drafter.options.max_nodes)
            for row, root in enumerate(state.root_ids.tolist())
        ]
        self._drafted_at = time.perf_counter()
        return DraftTree.from_rows([(row.tokens, row.parents) for row in merged])

    def close(self) -> None:
        """Closes the parts; those that go on in the next turn are told everything first."""
        self._drafter.ledger = self._ledger
        try:
            for part in self._parts:
                if part.session.carries_over:
                    part.read()
        finally:
            self._close_parts()

    def _close_parts(self) -> None:
        while self._parts:
            try:
                self._parts.pop().session.close()
            except BaseException:
                self._close_parts()
                raise

    def _drafts(self) -> list[tuple[int, DraftSession, DraftTree]]:
        return [(i, part.session, part.tree) for i, part in enumerate(self._parts) if part.tree is not None]

    def _pays(self, part: _Part, rows: Sequence[int]) -> bool:
        """Whether a part's expected tokens are worth its time, given the drafts of the cheaper ones."""
        drafts = self._drafts()
        is_known = part.draft_seconds is not None and self._rest_seconds is not None
        if not drafts or not is_known or not self._is_selective or self._num_drafts % _TRY_EVERY == 0:
            return True
        assert part.draft_seconds is not None
        assert self._rest_seconds is not None
        spent = self._rest_seconds + sum(self._parts[index].draft_seconds or 0.0 for index, _, _ in drafts)
        limit = self._drafter.options.max_nodes
        tokens, gain, index = 0.0, 0.0, self._parts.index(part)
        for row in rows:
            tokens += 1 + merge_row(row, 0, self._ledger, drafts, limit).expected_length
            gain += self._ledger.expected_gain(index, _grades(drafts, row))
        return (tokens + gain) / (spent + part.draft_seconds) > tokens / spent

    def _learn(self, tokens: list[list[int]], lengths: list[int]) -> None:
        drafts = self._drafts() if self._has_seen_prompt else []
        by_cost = sorted(drafts, key=lambda draft: self._parts[draft[0]].draft_seconds or 0.0)
        for row, length in enumerate(lengths):
            if not length:
                continue
            reached = {}
            for index, session, tree in drafts:
                reached[index] = self._ledger.record(index, session.grade(row), tree, row, tokens[row][:length])
            best = 0
            for position, (index, _, _) in enumerate(by_cost):
                if position:
                    gain = max(reached[index] - best, 0)
                    self._ledger.record_gain(index, _grades(by_cost[:position], row), gain)
                best = max(best, reached[index])
        for part in self._parts:
            part.tree = None  # learnt from


def _grades(drafts: Sequence[tuple[int, DraftSession, DraftTree]], row: int) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((index, session.grade(row)) for index, session, _ in drafts))


def _smoothed(known: float | None, seconds: float) -> float:
    return seconds if known is None else known + _SMOOTHING * (seconds - known)
