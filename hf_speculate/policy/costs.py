"""Measured cost of rounds, as a function of their size and of the context length."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..drafting import rising


_FIRST = 2  # observations that make a class reliable; until then the shortest one counts
_WARM_UP = 0.25  # weight of the first observation of a size; later ones weigh 1
_STEP = 0.02  # largest relative change by one later observation, because outliers are always slow
# The machine counts as busy if the slowest quarter of recent rounds took this many times as long as the fastest
# quarter, each relative to its expected time.
_RESTLESS = 1.2
_NUM_RECENT = 12
_LEAST = 1e-9  # seconds
# Assumed cost of a node and of a level before any was timed, in one-token forwards. It is low, so that the policy tries
# one.
_PER_NODE = 0.02
_PER_LEVEL = 0.1
# Worst-case cost of a node and of a level that were not timed, in one-token forwards, and of each further width where
# forwards are padded. On an H200, 8 nodes take 1.1 times as long as one, and 16 take 1.25 times as long.
_DEAR = 0.15
_DEAR_WIDTH = 0.3

# Seconds by size; relative ones before the first observation.
TimeCurve = Callable[[float], float]


def interpolate(points: Sequence[float], values: Sequence[float], point: float) -> float:
    """Linear interpolation between `points` (ascending), constant beyond them."""
    place = bisect_left(points, point)
    if place in (0, len(points)):
        return values[min(place, len(points) - 1)]
    low, high = points[place - 1], points[place]
    share = (point - low) / (high - low)
    return values[place - 1] + share * (values[place] - values[place - 1])


@dataclass(frozen=True)
class _Observed:
    """The measured time of one class of sizes.

    Attributes:
        size: mean of the observed sizes.
        ratio: measured seconds divided by the seconds of the curve.
        count: number of observations.
    """

    size: float
    ratio: float
    count: float = 0.0

    @property
    def is_established(self) -> bool:
        return self.count >= _FIRST

    @property
    def is_timed(self) -> bool:
        """Whether it has observations other than warm-ups."""
        return self.count >= 1

    def with_warm_up(self, ratio: float) -> _Observed:
        if self.is_established:
            return self
        return _Observed(self.size, min(self.ratio, ratio), self.count + _WARM_UP)

    def against(self, expected: float) -> _Observed:
        """The observation, moved towards the ratio `expected` that the other classes suggest.

        A class with few observations moves if it is slower than expected. A warm-up may take any time, so before any
        other observation its ratio counts as at most twice `expected`.
        """
        if self.is_established or self.ratio <= expected:
            return self
        ratio = self.ratio if self.is_timed else min(self.ratio, 2 * expected)
        return replace(self, ratio=expected + (ratio - expected) * self.count / _FIRST)

    def with_another(self, size: int, ratio: float) -> tuple[_Observed, float]:
        """The observation updated by another one, and the factor by which the estimates of all sizes change.

        A busy machine is slow for all sizes. So most of a change goes to that factor, and less to the class itself.
        """
        step = max(min(ratio / max(self.ratio, 1e-9) - 1, _STEP), -_STEP)
        mean = self.size + (size - self.size) / min(self.count + 1, 2 * _FIRST)
        if not self.is_established:
            return _Observed(mean, min(self.ratio, ratio), self.count + 1), 1.0
        return _Observed(mean, self.ratio * (1 + step / _FIRST), self.count + 1), 1 + step


class _Table:
    """Measured times relative to a curve.

    Sizes are grouped into classes: up to 1, 2, 4, 8, 16 …. Each class has a robust average. Between classes the ratio
    is interpolated, and times never fall with the size.

    A size that seems slow is not tried again, so a size alone would keep a time from a slow minute. That is why sizes
    share a class. For the same reason a class with one or two observations counts little, unless it is faster than the
    other classes suggest.
    """

    def __init__(self, curve: TimeCurve, largest: int = 0):
        self.curve = curve
        self._observed: dict[int, _Observed] = {}
        # Replaced, never changed in place: other threads may be reading it.
        self._known: tuple[list[float], list[float]] = [], []
        self._seconds: dict[float, float] = {}  # answers of `at` since the last observation
        self.largest = largest  # largest size with a reliable time

    def __contains__(self, size: int) -> bool:
        known = self._observed.get(_class_of(size))
        return known is not None and known.is_timed

    @property
    def sizes(self) -> Sequence[float]:
        """Mean sizes of the observed classes, ascending."""
        return self._known[0]

    def record(self, size: int, seconds: float, is_warm_up: bool) -> float:
        """Learns one observation; see `_Observed.with_another`."""
        ratio = seconds / max(self.curve(size), 1e-9)
        known = self._observed.get(_class_of(size)) or _Observed(size, ratio)
        new, factor = (known.with_warm_up(ratio), 1.0) if is_warm_up else known.with_another(size, ratio)
        self._observed = {**self._observed, _class_of(size): new}
        observed = [self._observed[size_class] for size_class in sorted(self._observed)]
        trusted = [entry for entry in observed if entry.is_established] or [
            min(observed, key=lambda entry: entry.ratio)
        ]
        self.largest = max(self.largest, 1 << _class_of(round(trusted[-1].size)))
        known = self._fitted(trusted)
        if len(trusted) < len(observed):  # move the others towards what these suggest
            known = self._fitted([entry.against(interpolate(*known, entry.size)) for entry in observed])
        self._known = known
        self._seconds = {}
        return factor

    def _fitted(self, observed: Sequence[_Observed]) -> tuple[list[float], list[float]]:
        """Sizes and ratios, adjusted so that a larger size never takes less time."""
        expected = [max(self.curve(entry.size), 1e-9) for entry in observed]
        pooled = rising([o.ratio * s for o, s in zip(observed, expected, strict=True)], [o.count + 1 for o in observed])
        return [entry.size for entry in observed], [p / s for p, s in zip(pooled, expected, strict=True)]

    def is_established(self, size: int) -> bool:
        known = self._observed.get(_class_of(size))
        return known is not None and known.is_established

    def at(self, size: float) -> float:
        asked = self._seconds  # read before `_known`, which `record` replaces first
        if (seconds := asked.get(size)) is None:
            sizes, ratios = self._known
            asked[size] = seconds = (interpolate(sizes, ratios, size) if sizes else 1.0) * self.curve(size)
        return seconds

    def alike(self) -> _Table:
        """A table for another context length; its curve is what this one has measured."""
        twin = _Table(self.curve)
        twin._known = self._known
        return _Table(twin.at, self.largest)


def _class_of(size: int) -> int:
    return (size - 1).bit_length()


class Timings:
    """Measured seconds as a function of size and context length.

    Each octave of the context from 512 on has its own table. A new table begins with the curve of its nearest
    neighbour, and its first observations scale that curve.

    Args:
        curve: relative seconds by size, before the first observation.
        like: timings of a similar case to begin with; None for none.
    """

    def __init__(self, curve: TimeCurve, like: Timings | None = None):
        self._curve, self._like = curve, like
        self._tables: dict[int, _Table] = {}
        self._sizes: set[int] = set()  # sizes with an observation
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)  # seconds divided by expected seconds
        # how slow the machine is at the moment, relative to its average
        self._slowness = 1.0 if like is None else like._slowness

    def __bool__(self) -> bool:
        """Whether there are any observations."""
        return bool(self._tables or self._like)

    def knows(self, size: int, context: int = 0) -> bool:
        """Whether `size` was timed near this context length, here or in `like`.

        A warm-up does not count: a plain round that seems slow would make every draft look cheap.
        """
        return size in self._table(context) or (self._like is not None and self._like.knows(size, context))

    def is_established(self, size: int, context: int = 0) -> bool:
        """Whether sizes like this one have enough observations near this context length."""
        return self._table(context).is_established(size)

    @property
    def has_begun(self) -> bool:
        """Whether there was an observation, here or in `like`, learnt or not."""
        return bool(self._sizes) or (self._like is not None and self._like.has_begun)

    def skip_cold(self, size: int) -> bool:
        """Whether this is the very first observation. It must not be learnt, because libraries load and allocate memory
        in it. The next observation of `size` counts like any other."""
        is_cold = not self.has_begun
        if is_cold:
            self._sizes.add(size)
        return is_cold

    def record(self, size: int, seconds: float, context: int = 0) -> None:
        """Learns one observation.

        The first observation of a size is a warm-up, as libraries prepare kernels in it. Of the first observations of a
        class the shortest one counts. Later ones move an estimate of the median. The speed of the whole machine changes
        over time and is tracked separately.
        """
        octave = _octave(context)
        if octave not in self._tables:
            self._tables = {**self._tables, octave: self._table(context)}
        is_warm_up = size not in self._sizes
        self._sizes.add(size)
        if self.is_established(size, context):  # others are only guessed
            self._recent.append(seconds / max(self.at(size, context), 1e-9))
        self._slowness *= self._tables[octave].record(size, seconds / self._slowness, is_warm_up)

    @property
    def are_restless(self) -> bool:
        """Whether recent observations differ much from each other: other processes use the machine."""
        recent = sorted(self._recent)
        quarter = len(recent) // 4
        return len(recent) > 2 and recent[-1 - quarter] > _RESTLESS * recent[quarter]

    def at(self, size: float, context: int = 0) -> float:
        """Estimated seconds; relative ones before the first observation."""
        return self._slowness * self._table(context).at(size)

    def at_most(self, size: int, dear: float, context: int = 0, steps: Sequence[int] = ()) -> float:
        """Upper estimate of the seconds that `size` takes: `dear` seconds for each unit beyond the largest known size.

        Args:
            steps: sizes that exist, ascending; each one beyond the largest known size then takes `dear` seconds more.
        """
        table = self._table(context)
        if size <= table.largest:
            return self._slowness * table.at(size)
        known = self._slowness * table.at(table.largest) if table.largest else 0.0
        num_more = sum(table.largest < step <= size for step in steps) or size - table.largest
        return max(self._slowness * table.at(size), known + dear * num_more)

    def slope(self, context: int = 0) -> float:
        """Seconds for one more unit of size, between the smallest and the largest known size."""
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
        return _Table(self._curve) if self._like is None else self._like._table(context).alike()


def _octave(context: int) -> int:
    return (context // 512).bit_length()


class RoundCosts:
    """Measured cost of rounds on one target at one batch size; all calls of a speculator share it.

    Four costs are kept:

    - drafting, by depth;
    - a call of a drafter that finds nothing;
    - the drafting phase of a round without a draft, which includes work between two rounds;
    - the rest of a round, by number of nodes (root included).

    Args:
        like: costs at another batch size to begin with; None for none.
        widths: numbers of nodes, root included, to which forwards are padded, ascending; empty if they are not. All
            trees of one width cost the same.
    """

    def __init__(self, like: RoundCosts | None = None, widths: Sequence[int] = ()):
        self.widths = widths
        self.rounds = Timings(lambda size: 1 + _PER_NODE * size, None if like is None else like.rounds)
        self.drafting = Timings(lambda depth: 1 + depth, None if like is None else like.drafting)
        self.asking = Timings(lambda _: 1.0, None if like is None else like.asking)
        self._idle = Timings(lambda _: 1.0, None if like is None else like._idle)

    def width(self, num_nodes: int) -> int:
        """Number of nodes that a round with `num_nodes` draft nodes runs."""
        return next((width for width in self.widths if width > num_nodes), num_nodes + 1)

    def idle(self, context: int = 0) -> float:
        """Seconds that the drafting phase of a round takes where nothing is drafted."""
        return self._idle.at(1, context) if self._idle else 0.0

    def record_idle(self, seconds: float, context: int) -> None:
        """Learns one observation of `idle`."""
        self._idle.record(1, max(seconds, _LEAST), context)

    def plain(self, context: int = 0) -> float:
        """Seconds of a round without a draft."""
        return self.rounds.at(1, context) + self.idle(context)

    def verifying(self, num_nodes: int, context: int = 0) -> float:
        """Seconds of a round with `num_nodes` draft nodes, without drafting."""
        return self.rounds.at(self.width(num_nodes), context)

    def loss_at_most(self, depth: int, num_nodes: int, context: int = 0, is_doubtful: bool = False) -> float:
        """The largest loss of a round whose draft is entirely wrong, in one-token forwards.

        Args:
            is_doubtful: whether to ignore drafting times with too few observations to be reliable.
        """
        plain = self.plain(context)
        dear = _DEAR * plain
        drafting = self.idle(context) + dear * depth
        if self.drafting and (self.drafting.is_established(depth, context) or not is_doubtful):
            drafting = self.drafting.at_most(depth, dear, context)
        if self.asking and (self.asking.is_established(1, context) or not is_doubtful):
            drafting = max(drafting, self.asking.at(1, context))
        dear = _DEAR_WIDTH * plain if self.widths else dear
        return (drafting + self.rounds.at_most(self.width(num_nodes), dear, context, self.widths)) / plain - 1

    def drafting_to(self, depth: int, context: int = 0) -> float:
        """Seconds to draft `depth` levels (at least 1)."""
        return self.drafting.at(depth, context) if self.drafting else _PER_LEVEL * depth * self.plain(context)

    def level(self, context: int = 0) -> float:
        """Seconds to draft one more level."""
        return self.drafting.slope(context) if self.drafting else _PER_LEVEL * self.plain(context)
