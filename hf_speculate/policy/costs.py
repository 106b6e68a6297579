"""The cost of rounds, as a function of their size and of the context, learnt as they run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..drafting import rising


_FIRST = 2  # observations of a class, of which the shortest counts, until it is believed
_WARM_UP = 0.25  # of an observation: what the first one of a size counts as
_STEP = 0.02  # by which a later one moves what is expected at the most: times have stray values on one side
# One-token forwards that a node, or a level, is expected to take before it was timed; low, so that it is tried.
_PER_NODE = 0.02
_PER_LEVEL = 0.1
# The same, where the question is what a draft may cost at the most.
_DEAR = 0.15

# Seconds of a size; relative ones as long as nothing was observed.
Shape = Callable[[float], float]


def interpolate(points: Sequence[float], values: Sequence[float], point: float) -> float:
    """Linear between `points` (ascending), constant beyond them."""
    place = bisect_left(points, point)
    if place in (0, len(points)):
        return values[min(place, len(points) - 1)]
    low, high = points[place - 1], points[place]
    share = (point - low) / (high - low)
    return values[place - 1] + share * (values[place] - values[place - 1])


@dataclass(frozen=True)
class _Observed:
    """The seconds that sizes of one class took.

    Attributes:
        size: their mean.
        ratio: of their seconds to the shape's.
        count: observations.
    """

    size: float
    ratio: float
    count: float = 0.0

    @property
    def is_established(self) -> bool:
        return self.count >= _FIRST

    @property
    def is_timed(self) -> bool:
        """Whether there were others than warm-ups."""
        return self.count >= 1

    def with_warm_up(self, ratio: float) -> _Observed:
        if self.is_established:
            return self
        return _Observed(self.size, min(self.ratio, ratio), self.count + _WARM_UP)

    def beside(self, expected: float) -> _Observed:
        """The seconds to believe where others say `expected`. Warm-ups may take any time, which says nothing."""
        if self.is_established or self.ratio <= expected:
            return self
        ratio = self.ratio if self.is_timed else min(self.ratio, 2 * expected)
        return replace(self, ratio=expected + (ratio - expected) * self.count / _FIRST)

    def with_another(self, size: int, ratio: float) -> tuple[_Observed, float]:
        """The observation with another one, and the factor by which that moves what is expected of all sizes, as what
        slows one slows all; what is remembered of these relative to the others moves less."""
        step = max(min(ratio / max(self.ratio, 1e-9) - 1, _STEP), -_STEP)
        mean = self.size + (size - self.size) / min(self.count + 1, 2 * _FIRST)
        if not self.is_established:
            return _Observed(mean, min(self.ratio, ratio), self.count + 1), 1.0
        return _Observed(mean, self.ratio * (1 + step / _FIRST), self.count + 1), 1 + step


class _Table:
    """The distance of observed seconds from a shape: robust averages over sizes up to 1, 2, 4, 8, 16 …, linear in
    between, never less for more. (A table of every size keeps what a size took in a slow minute until it is tried
    again, and it is not tried again.) A class that was seen once or twice counts little, unless it is faster than the
    others let expect: what is slow at first would not be tried again either."""

    def __init__(self, shape: Shape, largest: int = 0):
        self.shape = shape
        self._observed: dict[int, _Observed] = {}
        # Replaced, never changed: other threads may be reading them.
        self._known: tuple[list[float], list[float]] = [], []
        self._seconds: dict[float, float] = {}  # that were asked for since
        self.largest = largest  # size of which the seconds are believed

    def __contains__(self, size: int) -> bool:
        known = self._observed.get(_class_of(size))
        return known is not None and known.is_timed

    @property
    def sizes(self) -> Sequence[float]:
        """Ascending."""
        return self._known[0]

    @property
    def believed(self) -> list[int]:
        """Sizes that were observed often enough."""
        return [round(each.size) for each in self._observed.values() if each.is_established]

    def record(self, size: int, seconds: float, is_warm_up: bool) -> float:
        """Learns one observation; see `_Observed.with_another`."""
        ratio = seconds / max(self.shape(size), 1e-9)
        known = self._observed.get(_class_of(size)) or _Observed(size, ratio)
        new, factor = (known.with_warm_up(ratio), 1.0) if is_warm_up else known.with_another(size, ratio)
        self._observed = {**self._observed, _class_of(size): new}
        observed = [self._observed[each] for each in sorted(self._observed)]
        trusted = [each for each in observed if each.is_established] or [min(observed, key=lambda each: each.ratio)]
        self.largest = max(self.largest, 1 << _class_of(round(trusted[-1].size)))
        known = self._fitted(trusted)
        self._known = self._fitted([each.beside(interpolate(*known, each.size)) for each in observed])
        self._seconds = {}
        return factor

    def _fitted(self, observed: Sequence[_Observed]) -> tuple[list[float], list[float]]:
        """Sizes and ratios; never less for more."""
        shape = [max(self.shape(each.size), 1e-9) for each in observed]
        pooled = rising([o.ratio * s for o, s in zip(observed, shape, strict=True)], [o.count + 1 for o in observed])
        return [each.size for each in observed], [p / s for p, s in zip(pooled, shape, strict=True)]

    def is_established(self, size: int) -> bool:
        known = self._observed.get(_class_of(size))
        return known is not None and known.is_established

    def at(self, size: float) -> float:
        asked = self._seconds  # read before what is known, which is replaced first
        if (seconds := asked.get(size)) is None:
            sizes, ratios = self._known
            asked[size] = seconds = (interpolate(sizes, ratios, size) if sizes else 1.0) * self.shape(size)
        return seconds

    def alike(self) -> _Table:
        """A table for other contexts, whose shape is what is known now."""
        twin = _Table(self.shape)
        twin._known = self._known
        return _Table(twin.at, self.largest)


def _class_of(size: int) -> int:
    return (size - 1).bit_length()


class Timings:
    """Seconds as a function of size and context. Every octave of the context from 512 on has a table of its own, which
    takes what its nearest neighbour knows for a mere shape: its own first observations stretch it.

    Args:
        shape: relative seconds by size, where nothing was observed.
        like: timings of something much alike, to begin with.
    """

    def __init__(self, shape: Shape, like: Timings | None = None):
        self._shape, self._like = shape, like
        self._tables: dict[int, _Table] = {}
        self._sizes: set[int] = set()  # that were observed
        self._slowness = 1.0 if like is None else like._slowness  # of the machine, at the moment

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self._tables or self._like)

    def knows(self, size: int, context: int = 0) -> bool:
        """Whether seconds of `size` were observed near this context, here or of what is alike. A warm-up is no
        observation: a plain round that seems slow would make every draft look cheap."""
        return size in self._table(context) or (self._like is not None and self._like.knows(size, context))

    def is_established(self, size: int, context: int = 0) -> bool:
        """Whether sizes like this one were observed near this context often enough to be believed."""
        return self._table(context).is_established(size)

    def record(self, size: int, seconds: float, context: int = 0) -> None:
        """Learns one observation. The first of every size is a warm-up (libraries prepare a kernel for it). Of the
        first ones of a class the shortest counts, in part; later ones move an estimate of the median.

        Machines have slower and faster minutes: their pace is kept apart from what one size takes of another."""
        octave = _octave(context)
        if octave not in self._tables:
            self._tables = {**self._tables, octave: self._table(context)}
        is_warm_up = size not in self._sizes
        self._sizes.add(size)
        self._slowness *= self._tables[octave].record(size, seconds / self._slowness, is_warm_up)

    def observations(self) -> list[tuple[int, int, float]]:
        """Context, size and seconds of what is believed."""
        contexts = ((1 << octave + 8 if octave else 0, table) for octave, table in self._tables.items())
        return [(context, size, self.at(size, context)) for context, table in contexts for size in table.believed]

    def at(self, size: float, context: int = 0) -> float:
        """Estimated seconds; relative ones where nothing is known."""
        return self._slowness * self._table(context).at(size)

    def at_most(self, size: int, dear: float, context: int = 0) -> float:
        """Seconds that `size` may take: `dear` for each one beyond the largest that is known."""
        table = self._table(context)
        if size <= table.largest:
            return self._slowness * table.at(size)
        known = self._slowness * table.at(table.largest) if table.largest else 0.0
        return max(self._slowness * table.at(size), known + dear * (size - table.largest))

    def slope(self, context: int = 0) -> float:
        """Seconds that one more of the size takes, between the smallest and the largest that are known."""
        sizes = self._table(context).sizes
        low = sizes[0] if sizes else 1.0
        high = sizes[-1] if len(sizes) > 1 else low + 1
        return (self.at(high, context) - self.at(low, context)) / (high - low)

    def _table(self, context: int) -> _Table:
        octave = _octave(context)
        if (known := self._tables.get(octave)) is not None:
            return known
        if self._tables:
            return self._tables[min(self._tables, key=lambda known: abs(known - octave))].alike()
        return _Table(self._shape) if self._like is None else self._like._table(context).alike()


def _octave(context: int) -> int:
    return (context // 512).bit_length()


class RoundCosts:
    """The cost of a round on one target at one batch size: drafting by depth, asking a drafter that finds nothing, and
    everything else by nodes (root included).

    Shared by all calls of a speculator.

    Args:
        like: costs of another number of rows, to begin with.
    """

    def __init__(self, like: RoundCosts | None = None):
        self.rounds = Timings(lambda size: 1 + _PER_NODE * size, None if like is None else like.rounds)
        self.drafting = Timings(lambda depth: 1 + depth, None if like is None else like.drafting)
        self.asking = Timings(lambda _: 1.0, None if like is None else like.asking)

    def plain(self, context: int = 0) -> float:
        """Seconds of a round without a draft."""
        return self.rounds.at(1, context)

    def verifying(self, num_nodes: int, context: int = 0) -> float:
        """Seconds of a round with `num_nodes` draft nodes, drafting left out."""
        return self.rounds.at(num_nodes + 1, context)

    def loss_at_most(self, depth: int, num_nodes: int, context: int = 0) -> float:
        """One-token forwards that a round with `depth` levels and `num_nodes` scored nodes loses if all are wrong."""
        plain = self.plain(context)
        dear = _DEAR * plain
        drafting = self.drafting.at_most(depth, dear, context) if self.drafting else dear * depth
        if self.asking:
            drafting = max(drafting, self.asking.at(1, context))
        return (drafting + self.rounds.at_most(num_nodes + 1, dear, context)) / plain - 1

    def drafting_to(self, depth: int, context: int = 0) -> float:
        """Seconds of a draft whose deepest node is at `depth` (>= 1)."""
        return self.drafting.at(depth, context) if self.drafting else _PER_LEVEL * depth * self.plain(context)

    def level(self, context: int = 0) -> float:
        """Seconds of one more level."""
        return self.drafting.slope(context) if self.drafting else _PER_LEVEL * self.plain(context)
