"""The tables of `bench generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..commands.grid import Grid, by_depth, group_breaks, number, ratio
from .summary import BEST_STOCK
from .workload import describe_target


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """One of all methods, one of speed-ups by category if there are several, and details, a line each."""
    parts = [_methods(result), _by_category(result), _details(result)]
    return [part for part in parts if part]


def _methods(result: dict[str, Any]) -> Grid:
    rows = result["rows"]
    headers = ("tokens/s", "(range)", "x eager", "x best stock\nspeculative", "mean acceptance\nlength")
    has_compiled = any(row["kind"] == "stock_compiled" for row in rows)
    more = ("engine\nefficiency", "first token\nms", "memory\nMB", "identical\nto eager")
    compiled = ("x stock\ncompiled",) if has_compiled else ()
    cells = []
    for row in rows:
        rate, stats, memory = row["tokens_per_second"], row["speculation"] or {}, row.get("memory") or {}
        line = [
            f"{row['batch_size']}",
            f"{row['temperature']:g}",
            row["method"],
            f"{rate['median']:.1f}",
            f"{rate['min']:.0f}-{rate['max']:.0f}",
            ratio(row["speedup"]["eager"]),
            ratio(row["speedup"][BEST_STOCK]),
            number(stats.get("mean_acceptance_length"), ".2f"),
            number(stats.get("engine_efficiency"), ".3f"),
            _first_token(row),
            _memory(memory),
            _identical(row["identical"]),
        ]
        if has_compiled:
            line.insert(6, ratio(row["speedup"].get("stock compiled")))
        cells.append(line)
    return Grid(
        title=f"{describe_target(result)}, median of {result['repeats']}",
        columns=["batch", "T", "method", *headers[:3], *compiled, *headers[3:], *more],
        rows=cells,
        words={"method"},
        breaks=group_breaks([(row["batch_size"], row["temperature"]) for row in rows]),
    )


def _by_category(result: dict[str, Any]) -> Grid | None:
    rows = [row for row in result["rows"] if "categories" in row and row["kind"] != "eager"]
    if not rows:
        return None
    cells = []
    for row in rows:
        line = [f"{row['batch_size']}", f"{row['temperature']:g}", row["method"]]
        for figures in row["categories"].values():
            length = figures.get("mean_acceptance_length")
            line.append(ratio(figures["speedup"]["eager"]) + (f" ({length:.2f})" if length else ""))
        cells.append(line)
    return Grid(
        title="x eager by category (mean acceptance length)",
        columns=["batch", "T", "method", *rows[0]["categories"]],
        rows=cells,
        words={"method"},
        breaks=group_breaks([(row["batch_size"], row["temperature"]) for row in rows]),
    )


def _details(result: dict[str, Any]) -> str:
    """Acceptance by depth and divergences, a line each."""
    lines = []
    for row in result["rows"]:
        where = f"{row['method']}, batch {row['batch_size']}, T={row['temperature']:g}"
        if stats := row["speculation"]:
            lines.append(f"acceptance by depth  {where}: {by_depth(stats['acceptance_rate_by_depth'])}")
        for found in _divergences(row):
            lines.append(f"divergence  {where}: prompt {found['prompt']}, new token {found['step']}{_verdict(found)}")
    return "\n".join(lines)


def _divergences(row: dict[str, Any]) -> Sequence[dict[str, Any]]:
    return (row["identical"] or {}).get("divergences", ()) if row["kind"] == "speculator" else ()


def _verdict(found: dict[str, Any]) -> str:
    if "is_tie" not in found:
        return f": margin {found['margin']:.3g} of {found['max_logit']:.3g}, not proven" if "margin" in found else ""
    if found["is_tie"]:
        error = f"{found['logit_error']:.3g} of {found['max_logit']:.3g}"
        return f": a tie, margin {found['margin']:.3g}, logit error {error}"
    return f": {'NOT A TIE: ' if found['is_tie'] is False else ''}{found['why']}"


def _first_token(row: dict[str, Any]) -> str:
    found = row.get("time_to_first_token")
    return "" if found is None else f"{1e3 * found['median']:.0f}"


def _memory(memory: dict[str, Any]) -> str:
    """What a call takes, and the drafter's weights."""
    weights = memory.get("drafter_mb", 0.0)
    return number(memory.get("above_start_mb"), ".0f") + (f" + {weights:.0f}" if weights else "")


def _identical(found: dict[str, Any] | None) -> str:
    return "" if found is None else f"{found['share']:.0%}"
