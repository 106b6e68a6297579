"""Drafters that follow a script: perfect, adversarial, of a set accuracy, random, empty, raising."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from ..drafting import Drafter, DraftRequest, DraftSession, DraftState
from ..tree import ROOT_PARENT, DraftTree


class _ScriptDrafter(Drafter):
    """A drafter that exists only in tests and benchmarks: not found by name, fits every target."""

    @classmethod
    def for_target(cls, target, **options: Any):
        return cls(**options)


class _SilentSession(DraftSession):
    """Learns nothing."""

    def observe(self, tokens, features, lengths) -> None:
        pass


class ScriptedDrafter(_ScriptDrafter):
    """Knows the text that will come and drafts it with a set accuracy.

    Args:
        continuation: the new tokens of each row, int64 [B, n] (or one list for a single row): what plain `generate`
            emits.
        branching: children at each depth of the path; `(1,) * 5` is a chain of five, `(4, 2, 1)` a tree of seven
            nodes. The true token takes a random place among the children, its own children hang on it.
        accuracy: probability that a level holds the true token: 1 is perfect, 0 adversarial (never right).
        vocab_size: tokens that are not the true one are drawn from here.
        seed: of the script's own random numbers.
    """

    name = "scripted"

    def __init__(
        self,
        continuation: Tensor | Sequence[int] | Sequence[Sequence[int]],
        branching: Sequence[int] = (1, 1, 1, 1, 1),
        *,
        accuracy: float = 1.0,
        vocab_size: int,
        seed: int = 0,
    ):
        rows = continuation.tolist() if isinstance(continuation, Tensor) else list(continuation)
        self.rows: list[list[int]] = [rows] if rows and isinstance(rows[0], int) else rows  # type: ignore[assignment]
        self.branching = tuple(branching)
        self.accuracy = accuracy
        self.vocab_size = vocab_size
        self.seed = seed

    def start(self, request: DraftRequest) -> DraftSession:
        return _ScriptedSession(self)


class _ScriptedSession(_SilentSession):
    def __init__(self, drafter: ScriptedDrafter):
        self.script = drafter
        self.random = random.Random(drafter.seed)

    def draft(self, state: DraftState) -> DraftTree:
        rows = [self._row(row, root, state) for row, root in enumerate(state.root_ids.tolist())]
        return DraftTree.from_rows(rows)

    def _row(self, row: int, root: int, state: DraftState) -> tuple[list[int], list[int]]:
        tokens, parents, node, on_script = [root], [ROOT_PARENT], 0, True
        branching = self.script.branching[: state.max_depth]
        for depth, count in enumerate(branching if state.active[row] else ()):
            true_token = self._true_token(row, state.num_emitted[row] + depth)
            children = self._wrong_tokens(1 if state.chains_only else count, true_token)
            place = self.random.randrange(len(children))
            on_script &= self.random.random() < self.script.accuracy
            if on_script and true_token is not None:
                children[place] = true_token
            first = len(tokens)
            tokens.extend(children)
            parents.extend([node] * len(children))
            node = first + place
        return tokens, parents

    def _true_token(self, row: int, index: int) -> int | None:
        tokens = self.script.rows[row % len(self.script.rows)]
        return tokens[index] if index < len(tokens) else None

    def _wrong_tokens(self, count: int, true_token: int | None) -> list[int]:
        """Distinct tokens other than the true one (fewer than `count` in a tiny vocabulary)."""
        population = min(self.script.vocab_size, count + 1)
        drawn = self.random.sample(range(self.script.vocab_size), population)
        return [token for token in drawn if token != true_token][:count] or [drawn[0]]


class RandomDrafter(_ScriptDrafter):
    """Trees of random structure and random tokens, different in every row and round."""

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
        return DraftTree.from_rows([self._row(root, state) for root in state.root_ids.tolist()])

    def _row(self, root: int, state: DraftState) -> tuple[list[int], list[int]]:
        tokens, parents, depths = [root], [ROOT_PARENT], [0]
        for _ in range(self.random.randint(0, self.script.max_nodes)):
            parent = len(tokens) - 1 if state.chains_only else self.random.randrange(len(tokens))
            token = self.random.randrange(self.script.vocab_size)
            is_new = all((p, t) != (parent, token) for p, t in zip(parents, tokens, strict=True))
            if is_new and depths[parent] < state.max_depth:
                tokens.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return tokens, parents


class EmptyDrafter(_ScriptDrafter):
    """Never drafts: every round is a plain decoding step."""

    name = "empty"

    def start(self, request: DraftRequest) -> DraftSession:
        return _EmptySession()


class _EmptySession(_SilentSession):
    def draft(self, state: DraftState) -> DraftTree:
        return DraftTree.root_only(state.root_ids)


class RaisingDrafter(_ScriptDrafter):
    """Raises `error` at call number `after` (from 0) of one of its methods, and drafts nothing before."""

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
