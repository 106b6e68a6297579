"""Measured cost of rounds, as a function of their size and of the context length."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from ..drafting import rising


_FIRST = 2  # observations that make a class reliable; until then the shortest one counts
_WARM_UP = 0.25  # weight of the first observation of a size; later ones weigh 1
# Largest relative change by one later observation. Outliers are always slow, so a fast one says more: on a machine that
# was busy a moment ago, drafts would seem cheap next to plain rounds, which nothing measures during drafts.
_STEP_UP, _STEP_DOWN = 0.02, 0.1
# The machine counts as busy if the slowest quarter of recent rounds took this many times as long as the fastest
# quarter, each relative to its expected time.
_RESTLESS = 1.2
_NUM_RECENT = 12
_LEAST = 1e-9  # seconds
_READ_AT_LEAST = 16  # tokens whose reading takes as long as what does not depend on their number
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


class _Observed(NamedTuple):
    """The measured time of one class of sizes.

    Attributes:
        size: mean of the observed sizes.
        ratio: measured seconds divided by the seconds of the curve.
        weight: number of observations; a warm-up counts as a quarter.
    """

    size: float
    ratio: float
    weight: float = 0.0

    @property
    def is_established(self) -> bool:
        return self.weight >= _FIRST

    @property
    def is_timed(self) -> bool:
        """Whether it has observations other than warm-ups."""
        return self.weight >= 1

    def with_warm_up(self, ratio: float) -> _Observed:
        if self.is_established:
            return self
        return _Observed(self.size, min(self.ratio, ratio), self.weight + _WARM_UP)

    def against(self, expected: float) -> _Observed:
        """The observation, moved towards the ratio `expected` that the other classes suggest.

        A class with few observations moves if it is slower than expected. A warm-up may take any time, so before any
        other observation its ratio counts as at most twice `expected`.
        """
        if self.is_established or self.ratio <= expected:
            return self
        ratio = self.ratio if self.is_timed else min(self.ratio, 2 * expected)
        return self._replace(ratio=expected + (ratio - expected) * self.weight / _FIRST)

    def with_another(self, size: int, ratio: float) -> tuple[_Observed, float]:
        """The observation updated by another one, and the factor by which the estimates of all sizes change.

        A busy machine is slow for all sizes. So most of a change goes to that factor, and less to the class itself.
        """
        step = _step(self.ratio, ratio)
        mean = self.size + (size - self.size) / min(self.weight + 1, 2 * _FIRST)
        if not self.is_established:
            return _Observed(mean, min(self.ratio, ratio), self.weight + 1), 1.0
        return _Observed(mean, self.ratio * (1 + step / _FIRST), self.weight + 1), 1 + step


def _step(estimate: float, observed: float) -> float:
    """The relative change of an estimate by one more observation."""
    return max(min(observed / max(estimate, _LEAST) - 1, _STEP_UP), -_STEP_DOWN)


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
        self._observed: dict[int, _Observed] = {}  # by class, ascending
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
        ratio, size_class = seconds / max(self.curve(size), _LEAST), _class_of(size)
        known = self._observed.get(size_class)
        if known is None:
            known = _Observed(size, ratio)
            self._observed = dict(sorted({**self._observed, size_class: known}.items()))
        new, factor = (known.with_warm_up(ratio), 1.0) if is_warm_up else known.with_another(size, ratio)
        self._observed = {**self._observed, size_class: new}
        observed = list(self._observed.values())
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
        sizes, ratios = [entry.size for entry in observed], [entry.ratio for entry in observed]
        expected = [max(self.curve(size), _LEAST) for size in sizes]
        seconds = [ratio * relative for ratio, relative in zip(ratios, expected, strict=True)]
        if any(after < before for before, after in pairwise(seconds)):
            pooled = rising(seconds, [entry.weight + 1 for entry in observed])
            ratios = [value / relative for value, relative in zip(pooled, expected, strict=True)]
        return sizes, ratios

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


@dataclass
class Typical:
    """The typical time of work that is always the same: the shortest of the first observations, moved slowly by later
    ones.

    Attributes:
        seconds: the typical time; 0 before the first observation.
        count: number of observations.
        has_begun: whether there was an observation, learnt or not.
    """

    seconds: float = 0.0
    count: int = 0
    has_begun: bool = False

    @property
    def is_established(self) -> bool:
        """Whether there are enough observations; the first one is a warm-up."""
        return self.count > _FIRST

    def skip_cold(self) -> bool:
        """Whether this is the very first observation, which must not be learnt (`Timings.skip_cold`)."""
        is_cold, self.has_begun = not self.has_begun, True
        return is_cold

    def record(self, seconds: float) -> None:
        """Learns one observation."""
        if self.is_established:
            self.seconds *= 1 + _step(self.seconds, seconds)
        else:
            self.seconds = max(min(seconds, self.seconds or seconds), _LEAST)
        self.count, self.has_begun = self.count + 1, True


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
        class the shortest one counts. Later ones move the estimate slowly, and faster down than up. The speed of the
        whole machine changes over time and is tracked separately.
        """
        octave = _octave(context)
        if octave not in self._tables:
            self._tables = {**self._tables, octave: self._table(context)}
        is_warm_up = size not in self._sizes
        self._sizes.add(size)
        if self.is_established(size, context):  # others are only guessed
            self._recent.append(seconds / max(self.at(size, context), _LEAST))
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

    Five costs are kept:

    - `drafting`, by depth;
    - `asking`: a call of a drafter that finds nothing;
    - `idle`: the drafting phase of a round without a draft, which includes work between two rounds;
    - `rounds`: the rest of a round, by number of nodes (root included);
    - reading a prompt, by number of tokens: it is taken to be linear, with a constant part of 16 tokens.

    Args:
        like: costs at another batch size to begin with; None for none.
        widths: numbers of nodes, root included, to which forwards are padded, ascending; empty if they are not. All
            trees of one width cost the same.
    """

    def __init__(self, like: RoundCosts | None = None, widths: Sequence[int] = ()):
        self.widths = widths
        self.rounds = Timings(lambda size: 1 + _PER_NODE * size, None if like is None else like.rounds)
        self.drafting = Timings(lambda depth: 1 + depth, None if like is None else like.drafting)
        self.asking = Typical() if like is None else replace(like.asking)
        self.idle = Typical() if like is None else replace(like.idle)
        self._reading_token = Typical() if like is None else replace(like._reading_token)

    def width(self, num_nodes: int) -> int:
        """Number of nodes that a round with `num_nodes` draft nodes runs."""
        return next((width for width in self.widths if width > num_nodes), num_nodes + 1)

    def record_reading(self, num_tokens: int, seconds: float) -> None:
        """Learns how long a prompt took to read, except for the very first one."""
        if not self._reading_token.skip_cold():
            self._reading_token.record(seconds / (num_tokens + _READ_AT_LEAST))

    def reading(self, num_tokens: int) -> float:
        """Seconds that the drafter takes to read a prompt; 0 if that is unknown."""
        return self._reading_token.seconds * (num_tokens + _READ_AT_LEAST)

    def plain(self, context: int = 0) -> float:
        """Seconds of a round without a draft."""
        return self.rounds.at(1, context) + self.idle.seconds

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
        drafting = self.idle.seconds + dear * depth
        if self.drafting and (self.drafting.is_established(depth, context) or not is_doubtful):
            drafting = self.drafting.at_most(depth, dear, context)
        if self.asking.is_established or not is_doubtful:
            drafting = max(drafting, self.asking.seconds)
        dear = _DEAR_WIDTH * plain if self.widths else dear
        return (drafting + self.rounds.at_most(self.width(num_nodes), dear, context, self.widths)) / plain - 1

    def drafting_to(self, depth: int, context: int = 0) -> float:
        """Seconds to draft `depth` levels (at least 1)."""
        return self.drafting.at(depth, context) if self.drafting else _PER_LEVEL * depth * self.plain(context)

    def level(self, context: int = 0) -> float:
        """Seconds to draft one more level."""
        return self.drafting.slope(context) if self.drafting else _PER_LEVEL * self.plain(context)
