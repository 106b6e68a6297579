"""Several drafters in one tree: `speculator="examples/pycoder-eagle3+prompt_lookup"`.

A head is right more often. A lookup costs almost no time, and drafts deeper where the text repeats itself. Every part
drafts its own tree, and the trees are merged. Nodes are ordered by how often such a node was accepted.

Free parts, which run no model, draft first. A head is skipped if the draft so far is expected to yield as many tokens
as the head's drafts usually do. A free part rests if its drafts take longer than plain decoding would take for the
tokens that they add. It is tried again every few rounds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hf_speculate.drafting import (
    Choices,
    Drafter,
    DraftRequest,
    DraftSession,
    DraftState,
    Observation,
)
from hf_speculate.errors import OptionError
from hf_speculate.policy import Acceptance
from hf_speculate.speculator import check_sizes, make_speculator, read_options
from hf_speculate.target import GenerativeModel
from hf_speculate.tree import ROOT_PARENT, DraftTree, TreeRow

from .parts import Knowledge, Pace, Part, RowDraft, value_of


if TYPE_CHECKING:
    from typing_extensions import Self


def merge_row(root: int, drafts: Sequence[RowDraft], max_nodes: int) -> TreeRow:
    """One tree of all drafts of a row. Equal paths become one node, with the largest of their probabilities. The
    `max_nodes` most probable nodes are kept."""
    places: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    tokens, parents, probs = [root], [ROOT_PARENT], [1.0]
    for row, probabilities in drafts:
        place = [0] * len(row.parents)
        for node, (token, parent) in enumerate(zip(row.token_ids, row.parents, strict=True)):
            if parent < 0:  # the root, padding
                continue
            above = place[parent]
            place[node] = merged = places.setdefault((above, token), len(tokens))
            if merged == len(tokens):
                tokens.append(token)
                parents.append(above)
                probs.append(0.0)
            probs[merged] = max(probs[merged], probabilities[node])
    return TreeRow(tokens, parents, [value_of(probability) for probability in probs]).best(max_nodes)


def expected_length(row: TreeRow) -> float:
    """Number of a tree's nodes that will be accepted, by its values."""
    assert row.values is not None
    return sum(map(math.exp, row.values[1:]))


@dataclass(frozen=True, kw_only=True, slots=True)
class CombinedOptions:
    """Options of combined drafting.

    Attributes:
        max_nodes: draft nodes of the merged tree, the root not counted.
    """

    max_nodes: int = 32

    def __post_init__(self) -> None:
        check_sizes("combined", self, "max_nodes")


Histories = dict[Any, list[Knowledge]]
"""Statistics of the parts from finished requests, by active adapters and by whether tokens were sampled."""


class CombinedSession(DraftSession):
    """The sessions of all parts of one request.

    Free parts draft first. A head is skipped in this round if their draft is expected to yield as many tokens as the
    head's drafts usually do, as in SuffixDecoding. Otherwise all drafts become one tree.
    """

    def __init__(
        self, drafters: Sequence[Drafter], options: CombinedOptions, histories: Histories, request: DraftRequest
    ):
        self._options, self._histories = options, histories
        self._kind = request.adapters, request.do_sample
        known = histories.get(self._kind) or [
            Knowledge(Acceptance(drafter.calibration.start(request.do_sample))) for drafter in drafters
        ]
        self._is_selective = request.adaptive
        self._parts: list[Part] = []
        try:
            for drafter, of_part in zip(drafters, known, strict=True):
                session = drafter.start(request)
                self._parts.append(
                    Part(drafter.name, session, drafter.feature_layers, drafter.is_free, deepcopy(of_part))
                )
        except BaseException:
            self._close_parts()
            raise
        self.carries_over = any(part.session.carries_over for part in self._parts)
        self._heads = [part for part in self._parts if not part.is_free]
        self._pace = Pace()
        self._has_seen_prompt = False

    def observe(self, tokens: Tensor, features: Mapping[int, Tensor], lengths: Tensor) -> None:
        if self._has_seen_prompt:
            self._learn(tokens.tolist(), lengths.tolist())
        for part in self._parts:
            part.waiting.append(Observation(tokens, {layer: features[layer] for layer in part.feature_layers}, lengths))
            if not self._has_seen_prompt:
                part.read()
        self._has_seen_prompt = True

    @property
    def num_choices(self) -> int:  # type: ignore[override]
        """The largest number of any part that does not rest."""
        return max((part.session.num_choices for part in self._parts if not part.rests), default=0)

    def observe_choices(self, choices: Choices) -> None:
        for part in self._parts:
            if not part.rests and (count := part.session.num_choices):
                part.session.observe_choices(choices.first(count))

    def sources(self, row: int, tokens: Sequence[int]) -> list[str]:
        depths = [(part.name, part.depth(row, tokens)) for part in self._parts]
        completing = "+".join(part.name for part in self._parts if part.completes)
        names = ("+".join(name for name, depth in depths if depth > place) for place in range(len(tokens)))
        return [name or completing for name in names]

    def draft(self, state: DraftState) -> DraftTree:
        self._pace.begin_draft()
        for part in self._parts:
            part.forget()
            part.rests = part.is_free and not self._is_due(part)
            if part.is_free and not part.rests:
                part.draft(state)
        merged = self._merged(self._parts, state)
        for part in self._heads:
            if not self._suffices(part, merged, state):
                is_first = not any(other.drafts for other in self._parts)
                part.draft(state)
                merged = self._merged(self._parts, state)
                alone = merged if is_first else self._merged([part], state)
                part.known.lengths.follow(_worth(alone, state))
        return DraftTree.from_rows(merged)

    def close(self) -> None:
        """Closes the parts; those that continue in the next turn observe everything first."""
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
        """The merged tree of every row, from the drafts of some parts."""
        merged: list[TreeRow] = []
        for row, root in enumerate(state.root_ids.tolist()):
            drafts = [part.drafts[row] for part in parts if part.drafts]
            merged.append(merge_row(root, drafts, self._options.max_nodes))
        for part in self._parts:
            merged = list(part.session.complete(merged, state, self._options.max_nodes))
        return merged

    def _is_due(self, part: Part) -> bool:
        """Whether a free part drafts in this round."""
        if not (self._is_selective and self._heads) or part.completes:
            return True
        return part.known.gain.is_due(self._pace.seconds_per_token)

    def _suffices(self, part: Part, drafted: Sequence[TreeRow], state: DraftState) -> bool:
        """Whether the drafts so far are expected to yield as many tokens as those of `part` usually do."""
        usual = part.known.lengths.mean
        return self._is_selective and usual is not None and _worth(drafted, state) >= usual

    def _learn(self, tokens: list[list[int]], lengths: list[int]) -> None:
        rows = [row for row, length in enumerate(lengths) if length]
        if rows and self._heads:
            self._pace.emitted(sum(lengths) / len(rows))
            accepted = {row: tokens[row][: lengths[row] - 1] for row in rows}
            for part in self._parts:
                if part.tree is not None:
                    part.known.gain.add(self._added(part, accepted), part.seconds)
        for part in self._parts:
            part.known.acceptance.fade()
            for row in rows:
                part.learn(row, tokens[row][: lengths[row]])
            part.forget()  # learnt from

    def _added(self, part: Part, accepted: Mapping[int, Sequence[int]]) -> float:
        """Tokens per row that a part's draft added to a round.

        For a head these are its accepted tokens. For a free part they are the accepted tokens beyond those of the
        heads. A head that was skipped counts with the tokens that it usually gains, less its time.

        Args:
            accepted: accepted draft tokens, by row.
        """
        if not part.is_free:
            return sum(part.depth(row, tokens) for row, tokens in accepted.items()) / len(accepted)
        pace = self._pace.seconds_per_token
        usual = max((head.known.gain.net(pace) for head in self._heads if head.tree is None), default=0.0)
        total = 0.0
        for row, tokens in accepted.items():
            of_heads = max(head.depth(row, tokens) for head in self._heads)
            total += max(part.depth(row, tokens), of_heads) - max(of_heads, usual)
        return total / len(accepted)


def _worth(drafted: Sequence[TreeRow], state: DraftState) -> float:
    """Expected number of accepted draft tokens, averaged over unfinished rows."""
    rows = [row for row, is_active in zip(drafted, state.active, strict=True) if is_active]
    return sum(map(expected_length, rows)) / max(len(rows), 1)


class CombinedDrafter(Drafter):
    """Drafts with several drafters at once."""

    name = "combined"
    takes_parts = True
    options_classes = (CombinedOptions,)

    def __init__(self, parts: Sequence[Drafter], options: CombinedOptions | None = None):
        if len(parts) < 2:
            raise OptionError(f"combined: needs at least two drafters, got {len(parts)}.")
        self._parts = tuple(parts)
        self.options = options or CombinedOptions()
        self.feature_layers = tuple(dict.fromkeys(layer for part in parts for layer in part.feature_layers))
        self.record = next((part.record for part in parts if part.feature_layers), self.record)
        self.histories: Histories = {}

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self._parts

    def __repr__(self) -> str:
        return f"CombinedDrafter({' + '.join(map(repr, self.parts))}, {self.options})"

    @classmethod
    def for_target(cls, target: GenerativeModel, **options: Any) -> Self:
        """`parts=` are drafters, names of drafters, or folders and Hub ids of heads; a pair adds options to a name:
        `parts=["prompt_lookup", ("examples/pycoder-eagle3", {"depth": 8})]`."""
        parts: Iterable[Any] = options.pop("parts", None) or ()
        try:
            chosen = read_options(CombinedOptions, options, cls.name, also=["parts"])
        except OptionError as error:
            if options.keys() <= {*CombinedOptions.__slots__}:
                raise
            raise OptionError(
                f"{error} An option of one part stands with its name: 'draft_model:model=PATH+suffix', or "
                "from_name('combined', target=..., parts=[('draft_model', {'model': ...}), 'suffix'])."
            ) from error
        return cls([_part(part, target) for part in parts], chosen)

    def check_target(self, target: GenerativeModel) -> None:
        """Checks the target of every part."""
        for part in self.parts:
            part.check_target(target)

    def forget(self) -> None:
        """Calls `forget` of every part."""
        for part in self.parts:
            part.forget()

    def start(self, request: DraftRequest) -> CombinedSession:
        return CombinedSession(self.parts, self.options, self.histories, request)


def _part(part: Any, target: GenerativeModel) -> Drafter:
    if isinstance(part, Drafter):
        return part
    if not isinstance(part, str | os.PathLike | tuple | list):
        raise OptionError(
            f"parts= takes drafters, names and folders, got {type(part).__name__}. A model stands in a pair: "
            "('draft_model', {'model': ...})."
        )
    name, options = (part, {}) if isinstance(part, str | os.PathLike) else part
    return make_speculator(os.fspath(name), target, **options).drafter
