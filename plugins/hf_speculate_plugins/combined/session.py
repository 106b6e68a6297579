"""One request of several drafters: who drafts, and what their trees make together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_speculate.drafting import Choices, Drafter, DraftRequest, DraftSession, DraftState, Observation
from hf_speculate.tree import DraftTree, TreeRow

from .merging import expected_length, merge_row
from .options import CombinedOptions
from .parts import Knowledge, Part


Histories = dict[Any, list[Knowledge]]
"""What finished requests have taught of the parts, by adapters in effect and whether tokens were sampled."""


class CombinedSession(DraftSession):
    """The sessions of the parts, in step.

    A draft from the text costs nothing: it comes first. Where it is worth what the others' drafts are worth as a rule,
    these are left out of the round (as SuffixDecoding does beside a head); else all drafts become one tree.

    Args:
        drafters: the parts.
        options: how large their tree is.
        histories: what earlier requests have taught, and where this one leaves what it did.
        request: what is to be drafted for.
    """

    def __init__(
        self, drafters: Sequence[Drafter], options: CombinedOptions, histories: Histories, request: DraftRequest
    ):
        self._options, self._histories = options, histories
        self._kind = request.adapters, request.do_sample
        known = histories.get(self._kind) or [Knowledge.of(drafter, request.do_sample) for drafter in drafters]
        self._is_selective = request.adaptive
        self._parts: list[Part] = []
        try:
            for drafter, of_part in zip(drafters, known, strict=True):
                session = drafter.start(request)
                self._parts.append(Part(session, drafter.feature_layers, drafter.is_free, of_part.copy()))
        except BaseException:
            self._close_parts()
            raise
        self.carries_over = any(part.session.carries_over for part in self._parts)
        self.num_choices = max(part.session.num_choices for part in self._parts)
        self._has_seen_prompt = False

    def observe(self, tokens: Tensor, features: Mapping[int, Tensor], lengths: Tensor) -> None:
        if self._has_seen_prompt:
            self._learn(tokens.tolist(), lengths.tolist())
        for part in self._parts:
            part.waiting.append(Observation(tokens, {layer: features[layer] for layer in part.feature_layers}, lengths))
            if not self._has_seen_prompt:
                part.read()
        self._has_seen_prompt = True

    def observe_choices(self, choices: Choices) -> None:
        for part in self._parts:
            if count := part.session.num_choices:
                part.session.observe_choices(choices.first(count))

    def draft(self, state: DraftState) -> DraftTree:
        for part in self._parts:
            part.forget()
        merged = self._merged([], state)
        for part in sorted(self._parts, key=lambda part: not part.is_free):
            if part.is_free or not self._suffices(part, merged, state):
                part.draft(state)
                merged = self._merged(self._parts, state)
                if not part.is_free:
                    part.known.lengths.fade()
                    part.known.lengths.add(_worth(self._merged([part], state), state))
        return DraftTree.from_rows(merged)

    def close(self) -> None:
        """Closes the parts; those that go on in the next turn are told everything first."""
        self._histories[self._kind] = [part.known for part in self._parts]
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

    def _merged(self, parts: Sequence[Part], state: DraftState) -> list[TreeRow]:
        """One tree a row of what some parts have drafted."""
        merged = []
        for row, root in enumerate(state.root_ids.tolist()):
            drafts = [part.drafts[row] for part in parts if part.drafts]
            merged.append(merge_row(root, drafts, self._options.max_nodes))
        return merged

    def _suffices(self, part: Part, drafted: Sequence[TreeRow], state: DraftState) -> bool:
        """Whether what is drafted already is worth what `part` drafts as a rule."""
        lengths = part.known.lengths
        if not self._is_selective or not lengths.weight:
            return False
        return _worth(drafted, state) >= lengths.total / lengths.weight

    def _learn(self, tokens: list[list[int]], lengths: list[int]) -> None:
        for part in self._parts:
            part.known.acceptance.fade()
            for row, length in enumerate(lengths):
                if length:
                    part.learn(row, tokens[row][:length])
            part.forget()  # learnt from


def _worth(drafted: Sequence[TreeRow], state: DraftState) -> float:
    """Draft tokens a row that are expected to be accepted, of rows that are not finished."""
    rows = [row for row, is_active in zip(drafted, state.active, strict=True) if is_active]
    return sum(map(expected_length, rows)) / max(len(rows), 1)
