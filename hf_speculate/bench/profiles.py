"""Acceptance that is set, not measured: what scripted drafters of benchmarks are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..drafting import Drafter
from ..errors import SpeculateError
from ..testing import ScriptedDrafter


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
        """Drafts such trees.

        Args:
            texts: prompt -> the tokens that plain `generate` writes after it.
            vocab_size: wrong tokens are drawn from here.
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
