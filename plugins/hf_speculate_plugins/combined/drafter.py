"""Several drafters in one tree: `speculator="examples/pycoder-eagle3+prompt_lookup"`.

A head is right more often, a lookup costs nothing and goes deeper where the text repeats itself. Every part drafts its
own tree, the trees are merged, and the nodes are ordered by how often such a node was accepted (`ledger`). Every part
drafts as deep as pays beside the drafts of the cheaper ones, or not at all; now and then all draft all they can.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.costs import Timings
from hf_speculate.drafter import Drafter, DraftRequest, DraftSession, DraftState
from hf_speculate.observations import Observation, joined
from hf_speculate.speculator import make_speculator
from hf_speculate.tree import DraftTree

from .history import Ledger, merge_row


if TYPE_CHECKING:
    from typing_extensions import Self


_TRY_EVERY = 16  # rounds: then every part drafts, whether it seems to pay or not
_SMOOTHING = 0.2
_SECONDS_PER_LEVEL = 1.0  # relative to the first, before any draft was timed


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
    chooses_depth = True

    def __init__(self, parts: Sequence[Drafter], options: CombinedOptions | None = None):
        if len(parts) < 2:
            raise ValueError(f"combined: needs at least two drafters, got {len(parts)}.")
        self.parts = tuple(parts)
        self.options = options or CombinedOptions()
        self.feature_layers = tuple(dict.fromkeys(layer for part in parts for layer in part.feature_layers))
        self.ledgers: dict[str, Ledger] = {}  # by the target's adapters

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


class CombinedSession(DraftSession):
    """The sessions of the parts, in step."""

    def __init__(self, drafter: CombinedDrafter, request: DraftRequest):
        self._drafter = drafter
        self._adapters = request.adapters
        known = drafter.ledgers.get(self._adapters)
        self._ledger = known.carried() if known else Ledger(len(drafter.parts))
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
            part.forget()
        for part in sorted(self._parts, key=lambda part: part.cost):
            if depth := self._best_depth(part, rows, state.max_depth):
                part.draft(state, depth)
        merged = [
            merge_row(row, root, self._ledger, self._drafts(), self._drafter.options.max_nodes)
            for row, root in enumerate(state.root_ids.tolist())
        ]
        self._drafted_at = time.perf_counter()
        return DraftTree.from_rows([(row.tokens, row.parents) for row in merged])

    def close(self) -> None:
        """Closes the parts; those that go on in the next turn are told everything first."""
        self._drafter.ledgers[self._adapters] = self._ledger
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

    def _best_depth(self, part: _Part, rows: Sequence[int], max_depth: int) -> int:
        """How deep a part should draft, given the drafts of the cheaper ones: for the most tokens a second."""
        drafts = self._drafts()
        is_known = bool(part.seconds) and self._rest_seconds is not None
        if not is_known or not self._is_selective or self._num_drafts % _TRY_EVERY == 0:
            return max_depth
        assert self._rest_seconds is not None
        spent = self._rest_seconds + sum(self._parts[i].seconds.at(self._parts[i].depth) for i, _, _ in drafts)
        limit, index = self._drafter.options.max_nodes, self._parts.index(part)
        tokens, gains = 0.0, [0.0] * max_depth
        for row in rows:
            tokens += 1 + merge_row(row, 0, self._ledger, drafts, limit).expected_length
            more = self._ledger.expected_gains(index, _grades(drafts, row), max_depth)
            gains = [sum(pair) for pair in zip(gains, more, strict=True)]
        best, best_rate = 0, tokens / spent if drafts else 0.0
        for depth, gain in enumerate(gains, start=1):
            rate = (tokens + gain) / (spent + part.seconds.at(depth))
            if rate > best_rate:
                best, best_rate = depth, rate
        return best

    def _learn(self, tokens: list[list[int]], lengths: list[int]) -> None:
        drafts = self._drafts() if self._has_seen_prompt else []
        by_cost = sorted(drafts, key=lambda draft: self._parts[draft[0]].cost)
        for row, length in enumerate(lengths):
            if not length:
                continue
            before = 0
            for position, (index, session, tree) in enumerate(by_cost):
                reached = self._ledger.record(index, session.grade(row), tree, row, tokens[row][:length])
                drafted, cheaper = self._parts[index].depth, _grades(by_cost[:position], row)
                # A draft that was followed to the end of the text that is known might have been followed further.
                drafted = reached if reached == length else drafted
                self._ledger.record_gain(index, cheaper, reached=reached, drafted=drafted, before=before)
                before = max(before, reached)
        for part in self._parts:
            part.forget()  # learnt from


def _grades(drafts: Sequence[tuple[int, DraftSession, DraftTree]], row: int) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((index, session.grade(row)) for index, session, _ in drafts))


def _smoothed(known: float | None, seconds: float) -> float:
    return seconds if known is None else known + _SMOOTHING * (seconds - known)
