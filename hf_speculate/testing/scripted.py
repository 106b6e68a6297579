"""Drafters that follow a script: with a set acceptance (perfect to adversarial), random, empty, raising."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from ..drafting import Drafter, DraftRequest, DraftSession, DraftState
from ..errors import SpeculateError
from ..tree import ROOT_PARENT, DraftTree, TreeRow


class _ScriptDrafter(Drafter):
    """A drafter for tests and benchmarks: it cannot be found by name, and fits every target."""

    @classmethod
    def for_target(cls, target, **options: Any):
        return cls(**options)


class _SilentSession(DraftSession):
    """A session that learns nothing."""

    def observe(self, tokens, features, lengths) -> None:
        pass


class ScriptedDrafter(_ScriptDrafter):
    """A drafter that knows the coming text and drafts it with a set acceptance.

    It draws in every round which levels are right. A script costs no time. With `paid` another drafter works in
    addition, and its drafts are thrown away.

    Args:
        continuation: the new tokens that plain `generate` emits, for each row, int64 [B, n] (or one list for a single
            row), or for each prompt, by its tokens.
        branching: number of children at each depth of the path; `(1,) * 5` is a chain of five, `(4, 2, 1)` a tree of
            seven nodes. The true token takes a random place among the children, and the next level hangs on it.
        accuracy: probability that a level holds the true token if the level above does, one for all levels or one
            each: 1 is perfect, 0 adversarial (never right).
        vocab_size: size of the vocabulary that wrong tokens are drawn from.
        seed: seed of the script's own random numbers.
        ranked: whether to draft like trained drafters: the child at rank r is true with a weight of 1 / (r + 1)², and
            nodes are ordered by value at any depth. Otherwise levels follow one another.
        paid: drafter that does its own work each round, as deep as the script; None for none. If it drafts ahead, so
            does this one.

    Raises:
        SpeculateError: the tree is larger than the vocabulary; a prompt has no continuation (at `start`).
    """

    name = "scripted"

    def __init__(
        self,
        continuation: Tensor | Sequence[int] | Sequence[Sequence[int]] | Mapping[tuple[int, ...], Sequence[int]],
        branching: Sequence[int] = (1, 1, 1, 1, 1),
        *,
        accuracy: float | Sequence[float] = 1.0,
        vocab_size: int,
        seed: int = 0,
        ranked: bool = False,
        paid: Drafter | None = None,
    ):
        self.texts = continuation if isinstance(continuation, Mapping) else None
        self.rows = [] if isinstance(continuation, Mapping) else _rows(continuation)
        self.branching = tuple(branching)
        accuracies = [accuracy] * len(self.branching) if isinstance(accuracy, int | float) else accuracy
        self.levels = tuple(zip(self.branching, accuracies, strict=False))
        self.vocab_size = vocab_size
        self.seed = seed
        self.ranked = ranked
        self.paid = paid
        self.drafts_ahead = paid is None or paid.drafts_ahead
        if paid is not None:
            self.feature_layers = paid.feature_layers
        if ranked and vocab_size <= sum(self.branching):
            raise SpeculateError(f"{sum(self.branching)} nodes need a vocabulary larger than {vocab_size} tokens.")

    def start(self, request: DraftRequest) -> DraftSession:
        rows = self.rows
        if self.texts is not None:
            prompts = [tuple(tokens) for tokens in unpadded(request.input_ids, request.attention_mask)]
            if any(prompt not in self.texts for prompt in prompts):
                raise SpeculateError("a scripted drafter was asked for a prompt that it has no text for.")
            rows = [list(self.texts[prompt]) for prompt in prompts]
        return _ScriptedSession(self, rows, None if self.paid is None else self.paid.start(request))


def _rows(continuation: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    rows: list[Any] = continuation.tolist() if isinstance(continuation, Tensor) else list(continuation)
    return [rows] if rows and isinstance(rows[0], int) else rows


def unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The tokens of every row without its padding."""
    mask = attention_mask if attention_mask is not None else input_ids.new_ones(input_ids.shape)
    rows = zip(input_ids.tolist(), mask.tolist(), strict=True)
    return [[token for token, real in zip(tokens, reals, strict=True) if real] for tokens, reals in rows]


@dataclass(frozen=True)
class _ScriptLevel:
    """The children of one node.

    Attributes:
        tokens: token of each child.
        place: index of the child that the next level is attached to, and that may be the true one.
        value: probability that a round reaches the node.
        shares: probability of each child to be the true one, if the round reaches the node.
    """

    tokens: list[int]
    place: int
    value: float
    shares: list[float]


class _ScriptedSession(DraftSession):
    def __init__(self, drafter: ScriptedDrafter, rows: Sequence[Sequence[int]], paid: DraftSession | None):
        self.script = drafter
        self.rows = rows
        self.paid = paid

    def observe(self, tokens, features, lengths) -> None:
        if self.paid is not None:
            self.paid.observe(tokens, features, lengths)

    def draft(self, state: DraftState) -> DraftTree:
        levels = self.script.levels
        if self.paid is not None:
            self.paid.draft(replace(state, max_depth=min(state.max_depth, len(levels))))
        rows = [self._row(row, root, state, levels) for row, root in enumerate(state.root_ids.tolist())]
        return DraftTree.from_rows(rows)

    def ahead(self, state: DraftState, path: Sequence[int]) -> DraftTree:
        levels = (*self.script.levels[:1], *self.script.levels)
        if self.paid is not None:
            self.paid.ahead(replace(state, max_depth=min(state.max_depth, len(levels))), path)
        return DraftTree.from_rows([self._row(0, int(state.root_ids[0]), state, levels)])

    def close(self) -> None:
        if self.paid is not None:
            self.paid.close()

    def _row(self, row: int, root: int, state: DraftState, shape: Sequence[tuple[int, float]]) -> TreeRow:
        levels = self._levels(row, state, shape) if state.active[row] else []
        order = [(depth, rank) for depth, level in enumerate(levels) for rank in range(len(level.tokens))]
        if self.script.ranked:
            order.sort(key=lambda node: levels[node[0]].value / (node[1] + 1) ** 2, reverse=True)
        tokens, parents, values = [root], [ROOT_PARENT], [0.0]
        index: dict[tuple[int, int], int] = {}
        for depth, rank in order:
            parent = 0
            for node in (*((above, levels[above].place) for above in range(depth)), (depth, rank)):
                if node not in index:
                    index[node] = len(tokens)
                    level = levels[node[0]]
                    tokens.append(level.tokens[node[1]])
                    parents.append(parent)
                    values.append(values[parent] + math.log(max(level.shares[node[1]], 1e-9)))
                parent = index[node]
        return TreeRow(tokens, parents, values)

    def _levels(self, row: int, state: DraftState, shape: Sequence[tuple[int, float]]) -> list[_ScriptLevel]:
        # Random numbers depend on the place in the text only, not on earlier drafts.
        drawn = random.Random(f"{self.script.seed}, {row}, {state.num_emitted[row]}")
        levels, on_script, value = [], True, 1.0
        for depth, (count, accuracy) in enumerate(shape[: state.max_depth]):
            true_token = self._true_token(row, state.num_emitted[row] + depth)
            children = self._wrong_tokens(1 if state.chains_only else count, true_token, drawn)
            place = self._place(len(children), drawn)
            on_script &= drawn.random() < accuracy
            if on_script and true_token is not None:
                children[place] = true_token
            weights = self._weights(len(children))
            levels.append(_ScriptLevel(children, place, value, [accuracy * each / sum(weights) for each in weights]))
            value *= accuracy
        return levels

    def _place(self, count: int, drawn: random.Random) -> int:
        if not self.script.ranked:
            return drawn.randrange(count)
        return drawn.choices(range(count), self._weights(count))[0]

    def _weights(self, count: int) -> list[float]:
        return [1 / (rank + 1) ** 2 if self.script.ranked else 1.0 for rank in range(count)]

    def _true_token(self, row: int, index: int) -> int | None:
        tokens = self.rows[row % len(self.rows)]
        return tokens[index] if index < len(tokens) else None

    def _wrong_tokens(self, count: int, true_token: int | None, drawn: random.Random) -> list[int]:
        """Distinct tokens other than the true one (fewer than `count` in a tiny vocabulary)."""
        population = min(self.script.vocab_size, count + 1)
        tokens = drawn.sample(range(self.script.vocab_size), population)
        return [token for token in tokens if token != true_token][:count] or tokens[:1]


class RandomDrafter(_ScriptDrafter):
    """A drafter of random trees, different in every row and round.

    Half of the rounds have random values, some of them NaN or above their parents'. The engine must not trust values.
    """

    name = "random"

    def __init__(self, *, vocab_size: int, max_nodes: int = 12, seed: int = 0):
        self.vocab_size = vocab_size
        self.max_nodes = max_nodes
        self.seed = seed

    def start(self, request: DraftRequest) -> DraftSession:
        return _RandomSession(self)


class _RandomSession(_SilentSession):
    def __init__(self, drafter: RandomDrafter):
        self.script = drafter
        self.random = random.Random(drafter.seed)

    def draft(self, state: DraftState) -> DraftTree:
        rows = [self._row(root, state) for root in state.root_ids.tolist()]
        if self.random.random() < 0.5:
            rows = [row._replace(values=[self._value() for _ in row.token_ids]) for row in rows]
        return DraftTree.from_rows(rows)

    def _value(self) -> float:
        return math.nan if self.random.random() < 0.05 else self.random.uniform(-4.0, 0.1)

    def _row(self, root: int, state: DraftState) -> TreeRow:
        tokens, parents, depths = [root], [ROOT_PARENT], [0]
        for _ in range(self.random.randint(0, self.script.max_nodes)):
            parent = len(tokens) - 1 if state.chains_only else self.random.randrange(len(tokens))
            token = self.random.randrange(self.script.vocab_size)
            is_new = all((p, t) != (parent, token) for p, t in zip(parents, tokens, strict=True))
            if is_new and depths[parent] < state.max_depth:
                tokens.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return TreeRow(tokens, parents)


class EmptyDrafter(_ScriptDrafter):
    """A drafter that never drafts: every round is a plain decoding step."""

    name = "empty"

    def start(self, request: DraftRequest) -> DraftSession:
        return _EmptySession()


class _EmptySession(_SilentSession):
    def draft(self, state: DraftState) -> DraftTree:
        return DraftTree.root_only(state.root_ids)


class RaisingDrafter(_ScriptDrafter):
    """A drafter that raises `error` at call number `after` (from 0) of one method, and drafts nothing before."""

    name = "raising"

    def __init__(
        self,
        *,
        where: Literal["start", "draft", "observe"] = "draft",
        after: int = 0,
        error: BaseException | None = None,
    ):
        self.where = where
        self.after = after
        self.error = error or RuntimeError("scripted failure")

    def start(self, request: DraftRequest) -> DraftSession:
        if self.where == "start":
            raise self.error
        return _RaisingSession(self)


class _RaisingSession(DraftSession):
    def __init__(self, drafter: RaisingDrafter):
        self.script = drafter
        self.calls = {"draft": 0, "observe": 0}

    def draft(self, state: DraftState) -> DraftTree:
        self._count("draft")
        return DraftTree.root_only(state.root_ids)

    def observe(self, tokens, features, lengths) -> None:
        self._count("observe")

    def _count(self, method: str) -> None:
        if method == self.script.where and self.calls[method] == self.script.after:
            raise self.script.error
        self.calls[method] += 1
