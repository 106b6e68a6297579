"""One request of several drafters: who drafts, how deep, and what their trees make together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from hf_speculate.drafting import Drafter, DraftRequest, DraftSession, DraftState, Observation
from hf_speculate.tree import DraftTree

from .history import AcceptanceHistory
from .merging import PartDraft, merge_row
from .options import CombinedOptions
from .parts import Part


Histories = dict[str, AcceptanceHistory]
"""What finished requests have taught, by the target's adapters in effect."""

_TRY_EVERY = 16  # rounds: then every part drafts, whether it seems to pay or not
_SMOOTHING = 0.2


class CombinedSession(DraftSession):
    """The sessions of the parts, in step.

    Args:
        drafters: the parts.
        options: how large their tree is.
        histories: what earlier requests have taught, and where this one leaves what it did.
        request: what is to be drafted for.
    """

    def __init__(
        self, drafters: Sequence[Drafter], options: CombinedOptions, histories: Histories, request: DraftRequest
    ):
        self._options, self._histories, self._adapters = options, histories, request.adapters
        known = histories.get(self._adapters)
        self._history = known.carried() if known else AcceptanceHistory(len(drafters))
        self._is_selective = request.adaptive
        self._parts: list[Part] = []
        try:
            for drafter in drafters:
                self._parts.append(Part(drafter.start(request), drafter.feature_layers))
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
            merge_row(row, root, self._history, self._drafts(), self._options.max_nodes)
            for row, root in enumerate(state.root_ids.tolist())
        ]
        self._drafted_at = time.perf_counter()
        return DraftTree.from_rows([(row.tokens, row.parents) for row in merged])

    def close(self) -> None:
        """Closes the parts; those that go on in the next turn are told everything first."""
        self._histories[self._adapters] = self._history
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

    def _drafts(self) -> list[PartDraft]:
        return [(i, part.session, part.tree) for i, part in enumerate(self._parts) if part.tree is not None]

    def _best_depth(self, part: Part, rows: Sequence[int], max_depth: int) -> int:
        """How deep a part should draft, given the drafts of the cheaper ones: for the most tokens a second."""
        drafts = self._drafts()
        is_known = bool(part.seconds) and self._rest_seconds is not None
        if not is_known or not self._is_selective or self._num_drafts % _TRY_EVERY == 0:
            return max_depth
        assert self._rest_seconds is not None
        spent = self._rest_seconds + sum(self._parts[i].seconds.at(self._parts[i].depth) for i, _, _ in drafts)
        limit, index = self._options.max_nodes, self._parts.index(part)
        tokens, gains = 0.0, [0.0] * max_depth
        for row in rows:
            tokens += 1 + merge_row(row, 0, self._history, drafts, limit).expected_length
            more = self._history.expected_gains(index, _confidences(drafts, row), max_depth)
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
                reached = self._history.learn(index, session.confidence(row), tree, row, tokens[row][:length])
                drafted, cheaper = self._parts[index].depth, _confidences(by_cost[:position], row)
                # A draft that was followed to the end of the text that is known might have been followed further.
                drafted = reached if reached == length else drafted
                self._history.learn_gain(index, cheaper, reached=reached, drafted=drafted, before=before)
                before = max(before, reached)
        for part in self._parts:
            part.forget()  # learnt from


def _confidences(drafts: Sequence[PartDraft], row: int) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((index, session.confidence(row)) for index, session, _ in drafts))


def _smoothed(known: float | None, seconds: float) -> float:
    return seconds if known is None else known + _SMOOTHING * (seconds - known)
