"""From single runs to the rows of a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..stats import SpeculationStats
from .methods import Method
from .timing import spread


BEST_STOCK = "best_stock_speculative"


@dataclass(frozen=True)
class Run:
    """One timed `generate` call."""

    method: str
    category: str
    repeat: int
    seconds: float
    num_tokens: int
    stats: SpeculationStats | None


def summarize(
    batch_size: int,
    temperature: float,
    runs: Sequence[Run],
    methods: Sequence[Method],
    identity: Mapping[str, dict[str, Any] | None],
) -> list[dict[str, Any]]:
    """One row for each method; with several categories each row has `categories`, the main figures of each."""
    categories = list(dict.fromkeys(run.category for run in runs))
    kinds = {method.name: method for method in methods}
    overall = _figures(runs, kinds)
    by_category = {name: _figures([r for r in runs if r.category == name], kinds) for name in categories}
    rows = []
    for name, figures in overall.items():
        method = kinds[name]
        row = {
            "method": name,
            "kind": method.kind,
            "spec": method.spec,
            "batch_size": batch_size,
            "temperature": temperature,
            **figures,
            "identical": identity[name],
        }
        if len(categories) > 1:
            row["categories"] = {category: _brief(found[name]) for category, found in by_category.items()}
        rows.append(row)
    return rows


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest speculator of one temperature and what it gains."""
    best = max((row for row in rows if row["kind"] == "speculator"), key=_tokens_per_second)
    identical = best["identical"]
    return {
        "speculator": best["spec"],
        "batch_size": best["batch_size"],
        "speedup": best["speedup"],
        "tokens_per_second": _tokens_per_second(best),
        "mean_acceptance_length": best["speculation"]["mean_acceptance_length"],
        "engine_efficiency": best["speculation"]["engine_efficiency"],
        "identical_share": identical["share"],
    }


def _figures(runs: Sequence[Run], methods: Mapping[str, Method]) -> dict[str, dict[str, Any]]:
    """Method -> tokens/s, speed-up against every baseline, and a speculator's statistics."""
    seconds = {name: _seconds_by_repeat(runs, name) for name in dict.fromkeys(run.method for run in runs)}
    ordered = [name for name in methods if name in seconds]
    tokens = {name: sum(run.num_tokens for run in runs if run.method == name and run.repeat == 0) for name in ordered}
    rates = {name: spread([tokens[name] / s for s in seconds[name]]) for name in ordered}
    stock = [name for name in ordered if methods[name].kind == "stock_speculative"]
    best_stock = max(stock, key=lambda name: rates[name]["median"], default=None)
    baselines = {name: name for name in ordered if methods[name].kind != "speculator"} | {BEST_STOCK: best_stock}
    result = {}
    for name in ordered:
        ratios = {
            key: [b / s for b, s in zip(seconds[baseline], seconds[name], strict=True)] if baseline else None
            for key, baseline in baselines.items()
        }
        result[name] = {
            "tokens_per_second": rates[name],
            "speedup": {key: statistics.median(values) if values else None for key, values in ratios.items()},
            "speedup_range": {key: [min(values), max(values)] if values else None for key, values in ratios.items()},
            "best_stock_speculative": best_stock,
            "speculation": _merged_stats(run for run in runs if run.method == name),
        }
    return result


def _brief(figures: dict[str, Any]) -> dict[str, Any]:
    speculation = figures["speculation"] or {}
    kept = ("mean_acceptance_length", "acceptance_rate_by_depth")
    return {
        "tokens_per_second": figures["tokens_per_second"],
        "speedup": figures["speedup"],
        **{name: speculation[name] for name in kept if name in speculation},
    }


def _seconds_by_repeat(runs: Sequence[Run], method: str) -> list[float]:
    seconds: dict[int, float] = {}
    for run in runs:
        if run.method == method:
            seconds[run.repeat] = seconds.get(run.repeat, 0.0) + run.seconds
    return [seconds[repeat] for repeat in sorted(seconds)]


def _merged_stats(runs) -> dict[str, Any] | None:
    merged = None
    for run in runs:
        if run.stats is not None:
            merged = merged or SpeculationStats()
            merged.merge(run.stats)
    return None if merged is None else merged.to_dict()


def _tokens_per_second(row: dict[str, Any]) -> float:
    return row["tokens_per_second"]["median"]


def table(result: dict[str, Any]) -> RenderableType:
    """The result for the terminal: a table, one of speed-ups by category if there are several, and details."""
    env = result["environment"]
    title = (
        f"{result['target']} ({result['parameters'] / 1e6:.1f} M parameters, {result['dtype']}), {env['device']}, "
        f"{env['threads']} threads: {result['num_prompts']} prompts, {result['max_new_tokens']} new tokens, "
        f"median of {result['repeats']}"
    )
    rendered = Table(title=title, title_justify="left")
    rendered.add_column("batch", justify="right")
    rendered.add_column("T", justify="right")
    rendered.add_column("method")
    headers = ("tokens/s", "(range)", "x eager", "x best stock\nspeculative", "mean acceptance\nlength")
    for column in (*headers, "engine\nefficiency", "identical\nto eager"):
        rendered.add_column(column, justify="right")
    previous = None
    for row in result["rows"]:
        cell = (row["batch_size"], row["temperature"])
        if previous not in (None, cell):
            rendered.add_section()
        previous = cell
        rate, stats = row["tokens_per_second"], row["speculation"] or {}
        rendered.add_row(
            f"{cell[0]}",
            f"{cell[1]:g}",
            row["method"],
            f"{rate['median']:.1f}",
            f"{rate['min']:.0f}-{rate['max']:.0f}",
            _ratio(row["speedup"]["eager"]),
            _ratio(row["speedup"][BEST_STOCK]),
            _number(stats.get("mean_acceptance_length"), ".2f"),
            _number(stats.get("engine_efficiency"), ".3f"),
            _identical(row["identical"]),
        )
    return Group(*(part for part in (rendered, _category_table(result), _details(result)) if part is not None))


def _category_table(result: dict[str, Any]) -> Table | None:
    rows = [row for row in result["rows"] if "categories" in row and row["kind"] != "eager"]
    if not rows:
        return None
    rendered = Table(title="x eager by category (mean acceptance length)", title_justify="left")
    for column in ("batch", "T", "method", *rows[0]["categories"]):
        rendered.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        cells = []
        for figures in row["categories"].values():
            length = figures.get("mean_acceptance_length")
            cells.append(_ratio(figures["speedup"]["eager"]) + (f" ({length:.2f})" if length else ""))
        rendered.add_row(f"{row['batch_size']}", f"{row['temperature']:g}", row["method"], *cells)
    return rendered


def _details(result: dict[str, Any]) -> RenderableType | None:
    """Acceptance by depth and divergences, a line each."""
    lines = []
    for row in result["rows"]:
        where = f"{row['method']}, batch {row['batch_size']}, T={row['temperature']:g}"
        stats = row["speculation"]
        if stats:
            rates = " ".join(f"{depth}:{rate:.2f}" for depth, rate in stats["acceptance_rate_by_depth"].items())
            lines.append(f"acceptance by depth  {where}: {rates or 'no drafts'}")
        for found in (row["identical"] or {}).get("divergences", ()) if row["kind"] == "speculator" else ():
            lines.append(f"divergence  {where}: prompt {found['prompt']}, new token {found['step']}{_verdict(found)}")
    return Text("\n".join(lines)) if lines else None


def _verdict(found: dict[str, Any]) -> str:
    if "is_tie" not in found:
        return ""
    if found["is_tie"]:
        error = f"{found['logit_error']:.3g} of {found['max_logit']:.3g}"
        return f": a tie, margin {found['margin']:.3g}, logit error {error}"
    return f": {'NOT A TIE: ' if found['is_tie'] is False else ''}{found['why']}"


def _identical(found: dict[str, Any] | None) -> str:
    return "" if found is None else f"{found['share']:.0%}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
