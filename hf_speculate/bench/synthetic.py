"""Drafters with a set acceptance, for shapes without trained heads and for text that drafts badly.

A `SyntheticDrafter` knows what plain `generate` emits and drafts trees that are right as often as it is told, at each
depth. What it does not know is cost: `paid` lets another drafter (a head of the right shape with random weights) do its
work beside it, whose drafts are thrown away.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from ..drafting import Drafter, DraftRequest, DraftSession, DraftState
from ..errors import SpeculateError
from ..tree import ROOT_PARENT, DraftTree


# Of a level 0.7, wherever the level above was right.
DEFAULT_RATES = "0.7,0.49,0.343,0.24,0.168"

Texts = Mapping[tuple[int, ...], Sequence[int]]


@dataclass(frozen=True)
class AcceptanceProfile:
    """Acceptance of a tree, and its shape.

    Attributes:
        rates: share of the rounds that are accepted to depth 1, 2, … (unconditional, as `SpeculationStats` has them).
        widths: draft nodes at each depth.
    """

    rates: tuple[float, ...]
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        rates = self.rates
        is_falling = all(deeper <= rate for rate, deeper in pairwise(rates))
        if not rates or not is_falling or rates[0] > 1 or rates[-1] < 0:
            raise SpeculateError(
                "acceptance by depth is the share of rounds that get at least so deep: between 0 and 1, never rising; "
                f"got {list(rates)}."
            )

    @classmethod
    def of_nodes(cls, rates: Sequence[float], nodes: int) -> AcceptanceProfile:
        """So many nodes, where most rounds get: a rank is taken to be right as often as 1 / (rank + 1)²."""
        if nodes < 1:
            raise SpeculateError(f"a tree needs at least one node, got {nodes}.")
        values = [
            (reach / (rank + 1) ** 2, -depth) for depth, reach in enumerate(_reach(rates)) for rank in range(nodes)
        ]
        depths = [-negative for _, negative in sorted(values, reverse=True)[:nodes]]
        return cls(tuple(rates), tuple(depths.count(depth) for depth in range(max(depths) + 1)))

    @property
    def nodes(self) -> int:
        return sum(self.widths)

    @property
    def reach(self) -> tuple[float, ...]:
        """Share of the rounds that come to a level at all."""
        return _reach(self.rates)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Probability that a level is right where the one above it is."""
        return tuple(rate / before if before else 0.0 for rate, before in zip(self.rates, self.reach, strict=True))

    @property
    def mean_length(self) -> float:
        """Expected tokens of a round, bonus token included."""
        return 1 + sum(self.rates[: len(self.widths)])


def _reach(rates: Sequence[float]) -> tuple[float, ...]:
    return (1.0, *rates[:-1])


def read_profile(text: str, nodes: int) -> AcceptanceProfile:
    """`0.8,0.6,0.4`, or what was measured: `FILE.json` with `rounds` and `accepted_to_depth`.

    The file is `SpeculationStats.to_dict()`, or the result of `bench acceptance`: then its greedy row for trees of that
    many nodes is used; `FILE.json@NAME` says of which speculator.

    Raises:
        SpeculateError: neither; no such file or row; rising rates.
    """
    path, _, name = text.partition("@")
    if path.endswith(".json"):
        return AcceptanceProfile.of_nodes(_measured_rates(Path(path), name, nodes), nodes)
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise SpeculateError(
            f"acceptance must be rates by depth as 0.8,0.6,0.4 or a .json file; got {text!r}."
        ) from error
    return AcceptanceProfile.of_nodes(rates, nodes)


def _measured_rates(path: Path, name: str, nodes: int) -> tuple[float, ...]:
    """Share of all rounds; `acceptance_rate_by_depth` counts those that had a node there, which may rise with depth."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if "rows" in found:
            found = _row(found["rows"], name, nodes, path)
        counts = {int(depth): count for depth, count in found["accepted_to_depth"].items()}
        return tuple(counts[depth] / found["rounds"] for depth in sorted(counts))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise SpeculateError(
            f"cannot read acceptance from {path}: it must be a JSON object with rounds and accepted_to_depth, or the "
            f"result of `bench acceptance` ({type(error).__name__}: {error})."
        ) from error


def _row(rows: Sequence[dict[str, Any]], name: str, nodes: int, path: Path) -> dict[str, Any]:
    fitting = [row for row in rows if row["nodes"] == nodes and row["temperature"] == 0]
    chosen = [row for row in fitting if name in ("", row["speculator"])]
    if len(chosen) != 1:
        names = ", ".join(row["speculator"] for row in fitting) or "none"
        raise SpeculateError(f"{path} has greedy rows of {nodes} nodes for: {names}. Say {path}@NAME for one of them.")
    return chosen[0]


class SyntheticDrafter(Drafter):
    """Drafts trees that are accepted as a profile says.

    Args:
        texts: prompt -> the tokens that plain `generate` writes after it.
        profile: acceptance and shape.
        vocab_size: wrong tokens are drawn from here.
        paid: a drafter that does its own work each round, for its cost.
        seed: of what is right when.
    """

    name = "synthetic"

    def __init__(
        self, texts: Texts, profile: AcceptanceProfile, *, vocab_size: int, paid: Drafter | None = None, seed: int = 0
    ):
        if vocab_size <= profile.nodes:
            raise SpeculateError(f"{profile.nodes} nodes need a vocabulary larger than {vocab_size} tokens.")
        self.texts = texts
        self.profile = profile
        self.vocab_size = vocab_size
        self.paid = paid
        self.seed = seed
        self.feature_layers = () if paid is None else paid.feature_layers

    @classmethod
    def for_target(cls, target, **options: Any):
        return cls(**options)

    def start(self, request: DraftRequest) -> DraftSession:
        prompts = [tuple(tokens) for tokens in unpadded(request.input_ids, request.attention_mask)]
        if any(prompt not in self.texts for prompt in prompts):
            raise SpeculateError("a synthetic drafter was asked for a prompt that it has no text for.")
        rows = [self.texts[prompt] for prompt in prompts]
        return _SyntheticSession(self, rows, None if self.paid is None else self.paid.start(request))


def unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The tokens of every row without its padding."""
    mask = attention_mask if attention_mask is not None else input_ids.new_ones(input_ids.shape)
    rows = zip(input_ids.tolist(), mask.tolist(), strict=True)
    return [[token for token, real in zip(tokens, reals, strict=True) if real] for tokens, reals in rows]


class _SyntheticSession(DraftSession):
    def __init__(self, drafter: SyntheticDrafter, rows: Sequence[Sequence[int]], paid: DraftSession | None):
        self._rows = rows
        self._paid = paid
        self._vocab_size = drafter.vocab_size
        self._profile = drafter.profile
        self._widths = drafter.profile.widths
        self._random = random.Random(drafter.seed)

    def observe(self, tokens, features, lengths) -> None:
        if self._paid is not None:
            self._paid.observe(tokens, features, lengths)

    def draft(self, state: DraftState) -> DraftTree:
        if self._paid is not None:  # as deep as what is verified
            self._paid.draft(replace(state, max_depth=min(state.max_depth, len(self._widths))))
        rows = []
        for row, root in enumerate(state.root_ids.tolist()):
            depth = min(state.max_depth, len(self._widths)) if state.active[row] else 0
            widths = [1] * depth if state.chains_only else self._widths[:depth]
            rows.append(self._tree(root, self._rows[row][state.num_emitted[row] :], widths))
        return DraftTree.from_rows(rows)

    def close(self) -> None:
        if self._paid is not None:
            self._paid.close()

    def _tree(self, root: int, coming: Sequence[int], widths: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens and parents, best nodes first: the children of a level hang on the node that may be right there."""
        right = self._ranks_that_are_right(widths)
        reach = self._profile.reach
        order = sorted(
            ((reach[depth] / (rank + 1) ** 2, -depth, -rank) for depth, n in enumerate(widths) for rank in range(n)),
            reverse=True,
        )
        tokens, parents = [root], [ROOT_PARENT]
        place: dict[tuple[int, int], int] = {}
        levels = [self._tokens(n, right[d], coming[d] if d < len(coming) else None) for d, n in enumerate(widths)]

        def node_at(depth: int, rank: int) -> int:
            if (depth, rank) not in place:
                parent = node_at(depth - 1, right[depth - 1] or 0) if depth else 0
                place[depth, rank] = len(tokens)
                tokens.append(levels[depth][rank])
                parents.append(parent)
            return place[depth, rank]

        for _, negative_depth, negative_rank in order:
            node_at(-negative_depth, -negative_rank)
        return tokens, parents

    def _ranks_that_are_right(self, widths: Sequence[int]) -> list[int | None]:
        """For each depth the rank of the right child; None from the first level on that holds none."""
        ranks: list[int | None] = []
        on_path = True
        for probability, width in zip(self._profile.conditional, widths, strict=False):
            on_path &= self._random.random() < probability
            weights = list(accumulate(1 / (rank + 1) ** 2 for rank in range(width)))
            rank = self._random.choices(range(width), cum_weights=weights)[0]
            ranks.append(rank if on_path else None)
        return ranks

    def _tokens(self, width: int, right: int | None, token: int | None) -> list[int]:
        """Different tokens of one level; only the one at rank `right` is the one that comes."""
        drawn = self._random.sample(range(self._vocab_size), min(width + 1, self._vocab_size))
        wrong = [other for other in drawn if other != token][:width]
        if right is not None and token is not None:
            wrong[right] = token
        return wrong
