"""Several drafters in one tree: `speculator="examples/pycoder-eagle3+prompt_lookup"`.

A head is right more often, a lookup costs nothing and goes deeper where the text repeats itself. Every part drafts its
own tree, the trees are merged, and the nodes are ordered by how often such a node was accepted. Free parts draft in
every round. A head drafts too, unless their draft is worth as much as the head's drafts usually are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_speculate.drafting import (
    Calibration,
    Choices,
    Deepening,
    Drafter,
    DraftRequest,
    DraftSession,
    DraftState,
    Observation,
    joined,
)
from hf_speculate.errors import OptionError
from hf_speculate.policy import Acceptance, Average, PathProbabilities
from hf_speculate.speculator import make_speculator, read_options
from hf_speculate.tree import ROOT_PARENT, DraftTree, HostTree, TreeRow


if TYPE_CHECKING:
    from typing_extensions import Self


_SMALLEST = 1e-9  # a value is a logarithm

RowDraft = tuple[TreeRow, Sequence[float]]
"""Nodes of a row, and the probability of each to be right."""


def merge_row(root: int, drafts: Sequence[RowDraft], max_nodes: int) -> TreeRow:
    """One tree of all drafts of a row: equal paths become one node, as probable as the surer drafter says; the
    `max_nodes` most probable ones stay."""
    places: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    tokens, parents, found = [root], [ROOT_PARENT], [1.0]
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
                found.append(0.0)
            found[merged] = max(found[merged], probabilities[node])
    return TreeRow(tokens, parents, [value_of(probability) for probability in found]).best(max_nodes)


def value_of(probability: float) -> float:
    """Value of a node (`DraftTree.values`) of this probability."""
    return math.log(max(probability, _SMALLEST))


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
        if self.max_nodes < 1:
            raise ValueError(f"combined: max_nodes must be at least 1, got {self.max_nodes}.")


@dataclass
class Knowledge:
    """Experience with one part, from requests that are alike.

    Attributes:
        acceptance: acceptance of its nodes.
        lengths: tokens that its drafts were worth.
    """

    acceptance: Acceptance
    lengths: Average = field(default_factory=Average)


@dataclass
class Part:
    """One drafter at work.

    Attributes:
        name: name of the drafter.
        session: session of the drafter.
        feature_layers, is_free: attributes of the drafter.
        known: experience with its drafts.
        waiting: observations that the session has not been told of.
        tree, drafts: draft of this round, whole and by rows; None and empty if the part was left out.
    """

    name: str
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
        deepening = None if state.deepening is None else _in_probabilities(state.deepening, calibration)
        self.tree = self.session.draft(replace(state, deepening=deepening)).host
        self.drafts = [(row, self.known.acceptance.probabilities(row)) for row in self.tree.rows()]

    def forget(self) -> None:
        self.tree, self.drafts = None, []

    def path(self, row: int, tokens: Sequence[int]) -> list[int]:
        """The nodes of a row's draft that `tokens` after the root lead along, the root first; none without a draft."""
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


def _in_probabilities(deepening: Deepening, calibration: Calibration) -> Deepening:
    """`deepening`, asked with the probabilities that the drafter's values stand for."""
    probabilities = PathProbabilities(calibration)

    def goes_on(values: Tensor, previous: Tensor | None = None) -> bool:
        found = probabilities(values, previous)
        return deepening(torch.tensor([[value_of(each) for each in row] for row in found]), previous)

    return goes_on


Histories = dict[Any, list[Knowledge]]
"""Experience of finished requests with the parts, by adapters in effect and whether tokens were sampled."""


class CombinedSession(DraftSession):
    """The sessions of the parts, in step.

    A draft from the text costs nothing: it comes first. Where it is worth what the others' drafts are worth as a rule,
    these are left out of the round (as SuffixDecoding does beside a head); else all drafts become one tree.

    Args:
        drafters: the parts.
        options: size of the merged tree.
        histories: experience of earlier requests, to which this one adds its own.
        request: the request that the session drafts for.
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

    def sources(self, row: int, tokens: Sequence[int]) -> list[str]:
        depths = [(part.name, len(part.path(row, tokens)) - 1) for part in self._parts]
        completing = "+".join(part.name for part in self._parts if part.completes)
        names = ("+".join(name for name, depth in depths if depth > place) for place in range(len(tokens)))
        return [name or completing for name in names]

    def draft(self, state: DraftState) -> DraftTree:
        for part in self._parts:
            part.forget()
            if part.is_free:
                part.draft(state)
        merged = self._merged(self._parts, state)
        for part in self._parts:
            if not (part.is_free or self._suffices(part, merged, state)):
                part.draft(state)
                merged = self._merged(self._parts, state)
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
        """One tree a row of the drafts of some parts."""
        merged: list[TreeRow] = []
        for row, root in enumerate(state.root_ids.tolist()):
            drafts = [part.drafts[row] for part in parts if part.drafts]
            merged.append(merge_row(root, drafts, self._options.max_nodes))
        for part in self._parts:
            merged = list(part.session.complete(merged, state, self._options.max_nodes))
        return merged

    def _suffices(self, part: Part, drafted: Sequence[TreeRow], state: DraftState) -> bool:
        """Whether the drafts so far are worth as much as those of `part` as a rule."""
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


class CombinedDrafter(Drafter):
    """Drafts with several drafters at once.

    Args:
        parts: two or more drafters for the same target.
        options: see `CombinedOptions`.
    """

    name = "combined"
    options_classes = (CombinedOptions,)

    def __init__(self, parts: Sequence[Drafter], options: CombinedOptions | None = None):
        if len(parts) < 2:
            raise ValueError(f"combined: needs at least two drafters, got {len(parts)}.")
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
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
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

    def check_target(self, target: PreTrainedModel) -> None:
        """Every part has to fit."""
        for part in self.parts:
            part.check_target(target)

    def forget(self) -> None:
        """Every part forgets."""
        for part in self.parts:
            part.forget()

    def start(self, request: DraftRequest) -> CombinedSession:
        return CombinedSession(self.parts, self.options, self.histories, request)


def _part(part: Any, target: PreTrainedModel) -> Drafter:
    if isinstance(part, Drafter):
        return part
    if not isinstance(part, str | os.PathLike | tuple | list):
        raise TypeError(
            f"parts= takes drafters, names and folders, got {type(part).__name__}. A model stands in a pair: "
            "('draft_model', {'model': ...})."
        )
    name, options = (part, {}) if isinstance(part, str | os.PathLike) else part
    return make_speculator(os.fspath(name), target, **options).drafter
