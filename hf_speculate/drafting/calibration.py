"""The calibration of a drafter: how often nodes with a given value are right."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..files import json_writer, read_json, replace_files


CALIBRATION_FILE = "calibration.json"
_MAX_BYTES = 1 << 20

# Decay of the statistics after every round: a memory of about 30 rounds. Between 0.95 and 0.99 no value was clearly
# better on captured rounds.
MEMORY = 0.97
# Weight of the prior, in nodes. Between 2 and 16, less is better for long texts.
_PRIOR_WEIGHT = 3.0

# Bounds of the ranges of a node's log-probability given its parent; narrow where most nodes are.
_EDGES = (-6.0, -4.5, -3.5, -2.75, -2.1, -1.6, -1.2, -0.9, -0.65, -0.45, -0.3, -0.19, -0.1, -0.05, -0.02)
_SHARES = tuple(math.exp((low + high) / 2) for low, high in zip((-8.0, *_EDGES), (*_EDGES, 0.0), strict=True))

Shares = Sequence[float]
"""One share for each range of log-probabilities, rising."""


class Calibration:
    """Maps the log-probability of a node given its parent to the measured probability that it is right.

    The mapping is learnt from every round. It never falls (pooled adjacent violators) and forgets old rounds.

    Args:
        prior: shares to begin with and to return to; None takes the drafter's values as they are.
    """

    def __init__(self, prior: Shares | None = None):
        self._prior = tuple(prior or _SHARES)
        self._trials = [0.0] * len(self._prior)
        self._hits = [0.0] * len(self._prior)
        self._shares: list[float] | None = None

    def share(self, value: float) -> float:
        """The share of nodes with this value that are right if their parent is; 0 for NaN."""
        return self.shares[bisect_left(_EDGES, value)] if value == value else 0.0

    @property
    def shares(self) -> list[float]:
        if self._shares is None:
            weights = [trials + _PRIOR_WEIGHT for trials in self._trials]
            sums = [hits + _PRIOR_WEIGHT * prior for hits, prior in zip(self._hits, self._prior, strict=True)]
            self._shares = rising([s / w for s, w in zip(sums, weights, strict=True)], weights)
        return self._shares

    def count(self, value: float, is_hit: bool) -> None:
        """Learns from one node whose parent was right."""
        place = bisect_left(_EDGES, value)
        self._trials[place] += 1
        self._hits[place] += is_hit
        self._shares = None

    def fade(self) -> None:
        """Gives all earlier rounds less weight; called once per round."""
        self._trials = [MEMORY * trials for trials in self._trials]
        self._hits = [MEMORY * hits for hits in self._hits]
        self._shares = None


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` (weighted least squares, by pooling adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        length = 1
        while pools and pools[-1][0] > value:
            mean, other, count = pools.pop()
            value = (mean * other + value * weight) / (other + weight)
            weight, length = weight + other, length + count
        pools.append((value, weight, length))
    return [mean for mean, _, length in pools for _ in range(length)]


@dataclass(frozen=True)
class CalibrationTable:
    """The calibration saved with a head (`calibration.json`).

    Attributes:
        greedy, sampled: shares to begin with, for requests of each kind; None if unknown.
    """

    greedy: Shares | None = None
    sampled: Shares | None = None

    def start(self, samples: bool) -> Calibration:
        return Calibration(self.sampled if samples else self.greedy)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `calibration.json`; raises `CheckpointError` if it cannot, and leaves the old one."""
        content = {"edges": list(_EDGES), "greedy": self.greedy, "sampled": self.sampled}
        replace_files(folder, {CALIBRATION_FILE: json_writer(content, indent=1)})

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> CalibrationTable:
        """Reads `calibration.json`; an empty table without one.

        Raises:
            CheckpointError: the file is not a calibration.
        """
        path = Path(folder) / CALIBRATION_FILE
        if not os.path.lexists(path):
            return cls()
        try:
            content = read_json(path, _MAX_BYTES)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} Run `hf-speculate check --calibrate` to write it again, or remove it: the head's values are "
                "then used as they are."
            ) from error
        if content.get("edges") != list(_EDGES):
            raise CheckpointError(
                f"{path} has other ranges of values; run `hf-speculate check --calibrate` to write it again."
            )
        return cls(*(_checked(content.get(name), path, name) for name in ("greedy", "sampled")))


def _checked(shares: object, path: Path, name: str) -> Shares | None:
    if shares is None:
        return None
    if not isinstance(shares, list) or len(shares) != len(_SHARES) or not all(_is_share(share) for share in shares):
        raise CheckpointError(f"{path}: {name!r} must be {len(_SHARES)} shares from 0 to 1.")
    return tuple(shares)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
