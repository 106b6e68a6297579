"""The tables of `bench generate` and `bench batch`."""

from __future__ import annotations

from typing import Any

from ..commands import Grid, by_depth
from .workload import describe_target


_COLUMNS = {
    "batch": "{batch_size:d}",
    "T": "{temperature:g}",
    "method": "{method}",
    "tokens/s": "{tokens_per_second[median]:.1f}",
    "(range)": "{tokens_per_second[min]:.0f}-{tokens_per_second[max]:.0f}",
    "x eager": "{speedup[eager]:.2f}x",
    "x stock\ncompiled": "{speedup[stock compiled]:.2f}x",
    "x best stock\nspeculative": "{speedup[best_stock_speculative]:.2f}x",
    "x llama.cpp": "{speedup[llama.cpp]:.2f}x",
    "x OpenVINO": "{speedup[OpenVINO]:.2f}x",
    "mean acceptance\nlength": "{speculation[mean_acceptance_length]:.2f}",
    "engine\nefficiency": "{speculation[engine_efficiency]:.3f}",
    "identical\nto eager": "{identical[share]:.0%}",
}


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """One of all methods, one of speed-ups by category if there are several, and details, a line each."""
    groups, rows = ("batch_size", "temperature"), result["rows"]
    title = f"{describe_target(result)}, median of {result['repeats']}"
    parts: list[Grid | str] = [Grid.of(title, rows, _COLUMNS, groups=groups)]
    if "categories" in rows[0]:
        columns: dict[str, Any] = dict(list(_COLUMNS.items())[:3])
        columns |= {name: lambda row, name=name: _category(row["categories"][name]) for name in rows[0]["categories"]}
        ours = [row for row in rows if row["kind"] != "eager"]
        parts.append(Grid.of("x eager by category (mean acceptance length)", ours, columns, groups=groups))
    return [*parts, *_details(rows)]


def _details(rows: list[dict[str, Any]]) -> list[str]:
    """Acceptance by depth and divergences, a line each."""
    lines = []
    for row in (row for row in rows if row["kind"] == "speculator"):
        where = f"{row['method']}, batch {row['batch_size']}, T={row['temperature']:g}"
        lines.append(f"acceptance by depth  {where}: {by_depth(row['speculation']['acceptance_rate_by_depth'])}")
        for found in row["identical"]["divergences"]:
            lines.append(f"divergence  {where}: prompt {found['prompt']}, new token {found['step']}{_verdict(found)}")
    return ["\n".join(lines)]


def _verdict(found: dict[str, Any]) -> str:
    if "is_tie" not in found:
        return ""
    if found["is_tie"]:
        error = f"{found['logit_error']:.3g} of {found['max_logit']:.3g}"
        return f": a tie, margin {found['margin']:.3g}, logit error {error}"
    return f": {'NOT A TIE: ' if found['is_tie'] is False else ''}{found['why']}"


def _category(figures: dict[str, Any]) -> str:
    length = figures.get("mean_acceptance_length")
    return f"{figures['speedup']['eager']:.2f}x" + (f" ({length:.2f})" if length else "")
