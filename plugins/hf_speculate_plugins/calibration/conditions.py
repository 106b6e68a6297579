"""What acceptance depends on beside how a head is read: prompts, template, adapter, quantisation, dtype, context.

The same chains are drafted on what the target writes under one condition and under another. Texts differ then, so that
prompts are compared, not positions: in pairs where both conditions have the same prompts, else as two groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from .rates import AcceptanceRates


# A difference is named from here on: standard errors over prompts, and tokens a round.
_MIN_SIGMAS, _MIN_GAIN = 3.0, 0.15
_MIN_SPREAD = 0.1  # prompts that all gain the same are not infinitely sure
_MIN_PROMPTS = 4


@dataclass(frozen=True)
class Measured:
    """Chains of a head on texts that were written under one condition.

    Attributes:
        name: the condition, in words.
        accepted: int64 [P] of every prompt, the accepted tokens of its chains; empty where the target wrote too little.
        starts: position of the first of them, of every prompt.
        depth: of the chains.
    """

    name: str
    accepted: tuple[Int[Tensor, " P"], ...]
    starts: tuple[int, ...]
    depth: int

    @property
    def rates(self) -> AcceptanceRates:
        """Over all chains; there must be one."""
        return AcceptanceRates.of(torch.cat(self.accepted), self.depth)

    @property
    def num_chains(self) -> int:
        return sum(len(accepted) for accepted in self.accepted)

    def chosen(self, name: str, prompts: Sequence[int]) -> Measured:
        """Of some prompts only."""
        accepted, starts = tuple(self.accepted[i] for i in prompts), tuple(self.starts[i] for i in prompts)
        return Measured(name, accepted, starts, self.depth)

    def split(self, position: int) -> tuple[Measured, Measured]:
        """The chains that begin before a position, and those from there on."""
        cuts = [max(position - start, 0) for start in self.starts]
        before = tuple(accepted[:cut] for accepted, cut in zip(self.accepted, cuts, strict=True))
        after = tuple(accepted[cut:] for accepted, cut in zip(self.accepted, cuts, strict=True))
        starts = tuple(max(start, position) for start in self.starts)
        return (
            Measured(f"before position {position}", before, self.starts, self.depth),
            Measured(f"from position {position} on", after, starts, self.depth),
        )

    def means(self) -> Tensor:
        """float64 [prompts]: accepted tokens of a chain; NaN for a prompt without any."""
        return torch.stack([accepted.double().mean() for accepted in self.accepted])


@dataclass(frozen=True)
class Finding:
    """A condition that changes acceptance clearly.

    Attributes:
        kind: "chat template", "thinking", "prompts", "quantisation", "adapter", "dtype" or "context".
        message: what was found, with its figures.
        acceptance: name of a condition -> how much was accepted under it.
        gain: tokens a round that the better one has more.
        sigmas: the gain in standard errors over prompts.
    """

    kind: str
    message: str
    acceptance: Mapping[str, AcceptanceRates]
    gain: float
    sigmas: float


def compare_conditions(kind: str, now: Measured, other: Measured, *, lower: str, higher: str) -> Finding | None:
    """The same prompts under two conditions, in pairs; None where the difference is not clear.

    Args:
        lower, higher: what it may mean that acceptance is lower now than under the other condition, or higher.
    """
    pairs = other.means() - now.means()
    pairs = pairs[~pairs.isnan()]
    gain, error = _mean_and_error(pairs)
    if not _is_clear(gain, error, len(pairs)):
        return None
    return _finding(kind, (now, other), abs(gain), abs(gain) / error, lower if gain > 0 else higher)


def compare_sets(now: Measured, sets: Mapping[str, Sequence[int]]) -> list[Finding]:
    """Sets of prompts on which less is accepted than on the others.

    Args:
        sets: name -> indices of its prompts.
    """
    findings = []
    for name, own in sets.items():
        others = [i for i in range(len(now.accepted)) if i not in set(own)]
        pair = now.chosen(f"on prompts {name!r}", own), now.chosen("on the others", others)
        meaning = "is that another language or domain than it was trained on?"
        findings.append(_compare_groups("prompts", *pair, meaning))
    return [finding for finding in findings if finding is not None]


def compare_context(now: Measured, limit: int, what: str) -> Finding | None:
    """Whether less is accepted from a position on.

    Args:
        what: the limit in words, "the length that it was trained with".
    """
    before, after = now.split(limit)
    return _compare_groups("context", after, before, f"{limit} is {what}.")


def _compare_groups(kind: str, low: Measured, high: Measured, meaning: str) -> Finding | None:
    """Two groups of prompts of which the first accepts clearly less."""
    (first, error), (second, other_error) = (_mean_and_error(group.means()) for group in (low, high))
    smaller = min(int((~group.means().isnan()).sum()) for group in (low, high))
    gain, together = second - first, math.hypot(error, other_error)
    if gain <= 0 or not _is_clear(gain, together, smaller):
        return None
    return _finding(kind, (low, high), gain, gain / together, meaning)


def _finding(kind: str, pair: tuple[Measured, Measured], gain: float, sigmas: float, meaning: str) -> Finding:
    first, second = (measured.rates for measured in pair)
    figures = f"{first.mean_length:.2f} tokens a round {pair[0].name}, {second.mean_length:.2f} {pair[1].name}"
    message = f"{figures} ({gain:.2f} apart, {sigmas:.0f} sigma): {meaning}"
    return Finding(kind, message, {pair[0].name: first, pair[1].name: second}, gain, sigmas)


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    values = values[~values.isnan()]
    if not len(values):
        return 0.0, math.inf
    spread = float(values.std(correction=0)) if len(values) > 1 else 0.0
    return float(values.mean()), max(spread, _MIN_SPREAD) / math.sqrt(len(values))


def _is_clear(gain: float, error: float, num_prompts: int) -> bool:
    return num_prompts >= _MIN_PROMPTS and abs(gain) >= _MIN_GAIN and abs(gain) / error >= _MIN_SIGMAS
