"""Scripted drafters whose acceptance is set, and the options that set it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import typer

from hf_speculate.drafting import Drafter
from hf_speculate.errors import SpeculateError
from hf_speculate.speculator import Speculator
from hf_speculate.target import GenerativeModel
from hf_speculate.testing import ScriptedDrafter, unpadded
from hf_speculate_tools.bench.methods import Method, eager_method, speculator_method
from hf_speculate_tools.bench.runs import Request, generate_once


# Every level is right in 0.7 of the rounds where the level above was.
DEFAULT_RATES = "0.7,0.49,0.343,0.24,0.168"

Rates = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        help="Share of rounds that the scripted drafter gets accepted to depth 1, 2, ...: 0.8,0.6,0.4.",
    ),
]


Texts = Mapping[tuple[int, ...], Sequence[int]]
"""Prompt -> the tokens that plain `generate` writes after it."""


def plain_texts(
    model: GenerativeModel, requests: Sequence[Request], arguments: dict[str, Any]
) -> dict[tuple[int, ...], list[int]]:
    """Text that plain `generate` writes after each prompt, as a scripted drafter wants it."""
    texts: dict[tuple[int, ...], list[int]] = {}
    for request in requests:
        run = generate_once(model, eager_method(), request, arguments)
        for prompt, tokens in zip(unpadded(request.input_ids, request.attention_mask), run.rows, strict=True):
            texts[tuple(prompt)] = tokens
    return texts


@dataclass(frozen=True)
class AcceptanceProfile:
    """Set acceptance of a scripted drafter, and the shape of its trees.

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
        """Profile with `nodes` where most rounds get; a rank is taken to be right as often as 1 / (rank + 1)²."""
        if nodes < 1:
            raise SpeculateError(f"a tree needs at least one node, got {nodes}.")
        values = [
            (share / (rank + 1) ** 2, -depth) for depth, share in enumerate((1.0, *rates[:-1])) for rank in range(nodes)
        ]
        depths = [-negative for _, negative in sorted(values, reverse=True)[:nodes]]
        return cls(tuple(rates), tuple(depths.count(depth) for depth in range(max(depths) + 1)))

    @property
    def nodes(self) -> int:
        return sum(self.widths)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Probability that a level is right where the one above it is."""
        above = (1.0, *self.rates[:-1])
        return tuple(rate / before if before else 0.0 for rate, before in zip(self.rates, above, strict=True))

    @property
    def mean_length(self) -> float:
        """Expected tokens of a round, bonus token included."""
        return 1 + sum(self.rates[: len(self.widths)])

    def drafter(self, texts: Texts, *, vocab_size: int, paid: Drafter | None = None) -> ScriptedDrafter:
        """A drafter of such trees.

        Args:
            texts: prompt -> the tokens that plain `generate` writes after it.
            vocab_size: range from which wrong tokens are drawn.
            paid: a drafter that does its own work each round, for its cost.
        """
        return ScriptedDrafter(
            texts, self.widths, accuracy=self.conditional, vocab_size=vocab_size, ranked=True, paid=paid
        )


def read_profile(text: str, nodes: int) -> AcceptanceProfile:
    """Rates by depth, as `0.8,0.6,0.4`; raises `SpeculateError` for other text and for rising rates."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise SpeculateError(f"acceptance must be rates by depth as 0.8,0.6,0.4; got {text!r}.") from error
    return AcceptanceProfile.of_nodes(rates, nodes)


def scripted_methods(texts: Texts, profile: AcceptanceProfile, vocab_size: int) -> list[Method]:
    """A scripted drafter with automatic trees, and with fixed ones."""
    drafter = profile.drafter(texts, vocab_size=vocab_size)
    names = {"automatic": True, f"fixed {profile.nodes}": False}
    return [
        speculator_method(name, Speculator(drafter, adaptive=adaptive), spec=name) for name, adaptive in names.items()
    ]
