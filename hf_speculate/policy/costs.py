"""What rounds cost, as a function of their size and of the context, learnt as they run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from copy import copy


_WEIGHT = 0.2
_SURPRISE = 0.1  # a longer or shorter time counts as this much off: times have stray values on one side
_FIRST = 3  # observations that may hold a warm-up
_PRIOR_COST_PER_NODE = 0.02  # of a one-token forward
_PRIOR_COST_PER_LEVEL = 1.0

# Relative seconds of a size at a context.
Shape = Callable[[int, int], float]


def interpolate(points: Sequence[float], values: Sequence[float], point: float) -> float:
    """Linear between `points` (ascending), constant beyond them."""
    place = bisect_left(points, point)
    if place in (0, len(points)):
        return values[min(place, len(points) - 1)]
    low, high = points[place - 1], points[place]
    share = (point - low) / (high - low)
    return values[place - 1] + share * (values[place] - values[place - 1])


class _Table:
    """How far observed seconds are from a shape, by size: robust averages, linear in between."""

    def __init__(self, shape: Shape):
        self.shape = shape
        # Replaced, never changed: other threads may be reading them.
        self._known: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
        self._counts: dict[int, int] = {}

    def __contains__(self, size: int) -> bool:
        return size in self._counts

    def record(self, size: int, seconds: float, context: int) -> None:
        observed = seconds / max(self.shape(size, context), 1e-9)
        known = dict(zip(*self._known, strict=True))
        count = self._counts.get(size, 0) + 1
        self._counts = {**self._counts, size: count}
        if count <= _FIRST:
            known[size] = min(known.get(size, observed), observed)
        else:
            surprise = observed / max(known[size], 1e-9) - 1
            ratio = 1 + _WEIGHT * max(min(surprise, _SURPRISE), -_SURPRISE)
            # All sizes move, this one twice: what slows one slows all.
            known = {other: value * ratio for other, value in known.items()}
            known[size] *= ratio
        sizes = tuple(sorted(known))
        self._known = sizes, tuple(known[other] for other in sizes)

    def at(self, size: int, context: int) -> float:
        sizes, ratios = self._known
        ratio = interpolate(sizes, ratios, size) if sizes else 1.0
        return ratio * self.shape(size, context)

    def copy(self) -> _Table:
        new = _Table(self.shape)
        new._known, new._counts = self._known, self._counts
        return new

    def frozen(self) -> Shape:
        """What is known now as a shape for other contexts."""
        return self.copy().at


class Timings:
    """Seconds as a function of size and context, from observations.

    With a surface to begin with, observations correct it by a factor that depends on the size alone. Without one, every
    octave of the context from 512 on has a table of its own. A new one begins with what its neighbour knows; one
    further off takes that for a mere shape, which its own first observations stretch.

    Args:
        slope: relative rise per unit of size where nothing was observed.
        surface: seconds that are known of something much alike.
    """

    def __init__(self, slope: float, surface: Shape | None = None):
        self._surface = surface
        self._prior: Shape = surface or (lambda size, _: 1 + slope * size)
        self._tables: dict[int, _Table] = {}

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return self._surface is not None or bool(self._tables)

    def knows(self, size: int, context: int = 0) -> bool:
        """Whether seconds of `size` were observed near this context."""
        return self._surface is not None or size in self._table(context)

    def record(self, size: int, seconds: float, context: int = 0) -> None:
        """Learns one observation.

        The first ones may hold a warm-up: the shortest of three counts. Later ones move an estimate of the median, and
        that of all other sizes half as far: what slows one slows all.
        """
        table, octave = self._table(context), self._octave(context)
        if octave not in self._tables:
            self._tables = {**self._tables, octave: table}
        table.record(size, seconds, context)

    def at(self, size: int, context: int = 0) -> float:
        """Estimated seconds; relative ones where nothing is known."""
        return self._table(context).at(size, context)

    def frozen(self) -> Shape | None:
        """What is known now as a shape; None if that is nothing."""
        if not self:
            return None
        twin = copy(self)
        twin._tables = {octave: table.copy() for octave, table in self._tables.items()}
        return twin.at

    def _octave(self, context: int) -> int:
        return 0 if self._surface is not None else (context // 512).bit_length()

    def _table(self, context: int) -> _Table:
        octave = self._octave(context)
        if octave in self._tables:
            return self._tables[octave]
        if not self._tables:
            return _Table(self._prior)
        nearest = min(self._tables, key=lambda known: abs(known - octave))
        known = self._tables[nearest]
        return known.copy() if abs(octave - nearest) == 1 else _Table(known.frozen())


class RoundCosts:
    """What a round costs on one target at one batch size: drafting by depth, everything else by nodes (root included).

    Shared by all calls of a speculator.

    Args:
        rounds, drafting: what is known of something much alike, if anything.
    """

    def __init__(self, rounds: Shape | None = None, drafting: Shape | None = None):
        self.rounds = Timings(_PRIOR_COST_PER_NODE, rounds)
        self.drafting = Timings(_PRIOR_COST_PER_LEVEL, drafting)

    def as_prior(self) -> RoundCosts:
        """Costs of another number of rows: begun with what is known here, which the first observations stretch."""
        return RoundCosts(self.rounds.frozen(), self.drafting.frozen())

    def plain(self, context: int = 0) -> float:
        """Seconds of a round without a draft."""
        return self.rounds.at(1, context)

    def verifying(self, num_nodes: int, context: int = 0) -> float:
        """Seconds of a round with `num_nodes` draft nodes, drafting left out."""
        return self.rounds.at(num_nodes + 1, context)

    def drafting_to(self, depth: int, context: int = 0) -> float:
        """Seconds of a draft whose deepest node is at `depth`; 0 before the first one was seen."""
        return self.drafting.at(depth, context) if self.drafting else 0.0
