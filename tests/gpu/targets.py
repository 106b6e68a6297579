"""The figures that a GPU must reach, and whether the findings of the phase `speed` reach them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


Finding = dict[str, Any]
_SHAPES = ("0.5B", "8B")
_EAGER = (*_SHAPES, "pycoder", "0.5B, batch 8")


@dataclass(frozen=True)
class Target:
    """A ratio or time that must be reached.

    Attributes:
        name: what is compared.
        bound: limit.
        at_least: whether the figure must be at least the bound, or at most.
        unit: unit of figure and bound.
        figures: function of the rows of `speed`: the figure of each place where it was measured.
    """

    name: str
    bound: float
    at_least: bool
    unit: str
    figures: Callable[[Rows], dict[str, float | None]]

    def judge(self, rows: Rows) -> list[Finding]:
        """A finding for each place; one without a figure where nothing was measured."""
        wanted = f"{'>=' if self.at_least else '<='} {self.bound:g}{self.unit}"
        places = {place: found for place, found in self.figures(rows).items() if found is not None} or {"": None}
        return [
            {
                "target": self.name,
                "place": place,
                "wanted": wanted,
                "found": None if found is None else f"{found:.3g}{self.unit}",
                "met": None if found is None else (found >= self.bound if self.at_least else found <= self.bound),
            }
            for place, found in places.items()
        ]


class Rows:
    """The rows of the phase `speed`, by cell and way."""

    def __init__(self, findings: Iterable[Finding]):
        rows = [each for each in findings if each.get("phase") == "speed" and "tokens_per_second" in each]
        self.by_place = {(row["cell"], row["way"]): row for row in rows}

    def get(self, cell: str, way: str, key: str) -> float | None:
        return self.by_place.get((cell, way), {}).get(key)

    def ratio(self, cell: str, way: str, other: str, key: str = "ms_per_round") -> float | None:
        """Quotient of two ways of a cell."""
        mine, its = self.get(cell, way, key), self.get(cell, other, key)
        return mine / its if mine is not None and its else None

    def best(self, mode: str, key: str, cells: Sequence[str]) -> dict[str, float | None]:
        """Best figure of a mode's ways that draft, by cell."""
        found = {}
        for cell in cells:
            ways = {
                way: row[key]
                for (place, way), row in self.by_place.items()
                if place == cell and way.startswith(mode) and "nothing" not in way and row.get(key) is not None
            }
            if ways:
                way = max(ways, key=lambda each: ways[each])
                found[f"{cell}, {way.removeprefix(f'{mode}, ')}"] = ways[way]
        return found


def _without_draft(rows: Rows) -> dict[str, float | None]:
    """Round of the scripted drafter without the time of its script, over a step in which nothing is drafted."""
    round_ms = rows.get("8B", "recorded, 16 nodes", "ms_per_round")
    step = rows.get("8B", "recorded, nothing drafted", "ms_per_round")
    if round_ms is None or not step:
        return {}
    return {"8B": (round_ms - rows.by_place["8B", "recorded, 16 nodes"]["host_ms"]["drafter"]) / step}


def _share_of_head(rows: Rows) -> dict[str, float | None]:
    """Time that a head adds to a round, over a step in which nothing is drafted."""
    cell, step = "8B with a head", rows.get("8B with a head", "recorded, nothing drafted", "ms_per_round")
    with_head = rows.get(cell, "recorded, 16 nodes and a head", "ms_per_round")
    without = rows.get(cell, "recorded, 16 nodes", "ms_per_round")
    if with_head is None or without is None or not step:
        return {}
    return {"8B": (with_head - without) / step}


def _nothing(rows: Rows, cells: Sequence[str]) -> dict[str, float | None]:
    """Speed without drafts over stock's, where none are made and where the policy has stopped them."""
    kinds = ("nothing drafted", "automatic, nothing accepted")
    return {f"{cell}, {kind}": rows.get(cell, f"recorded, {kind}", "x_static") for cell in cells for kind in kinds}


TARGETS = (
    Target(
        "eager over HF eager, where a round yields 2 tokens or more",
        1.0,
        True,
        "x",
        lambda rows: {
            f"{cell}, {way.removeprefix('eager, ')}": row["x_eager"]
            for (cell, way), row in rows.by_place.items()
            if cell in _EAGER and way.startswith("eager") and (row.get("tokens_per_round") or 0) >= 2
        },
    ),
    Target("recorded over HF static + compile", 2.0, True, "x", lambda r: r.best("recorded", "x_static", _SHAPES)),
    Target("recorded over HF eager", 5.0, True, "x", lambda r: r.best("recorded", "x_eager", _SHAPES)),
    Target("round without its draft / plain step", 1.25, False, "", _without_draft),
    Target("draft of a head of one layer / plain step", 0.15, False, "", _share_of_head),
    Target("nothing drafted over HF static + compile", 0.98, True, "x", lambda r: _nothing(r, _SHAPES)),
    Target(
        "additional time of the first recorded call",
        2.0,
        False,
        " s",
        lambda r: {cell: r.get(cell, "recorded, 8 nodes", "first_call_extra_s") for cell in _SHAPES},
    ),
    Target(
        "recorded over HF static + compile, batch 8",
        1.3,
        True,
        "x",
        lambda r: r.best("recorded", "x_static", ["0.5B, batch 8"]),
    ),
    Target(
        "round / plain step after 8192 tokens",
        1.5,
        False,
        "",
        lambda r: {"8B": r.ratio("8B, 8k context", "recorded, 16 nodes", "recorded, nothing drafted")},
    ),
)


def judged(findings: Sequence[Finding]) -> list[Finding]:
    """All targets against the findings."""
    rows = Rows(findings)
    return [each for target in TARGETS for each in target.judge(rows)]
