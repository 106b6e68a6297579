"""Rows of a table, made of single runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..commands import spread
from .methods import Method
from .runs import TimedRun, merged, seconds_by_repeat


BEST_STOCK = "best_stock_speculative"


def summarize(
    batch_size: int,
    temperature: float,
    runs: Sequence[TimedRun],
    methods: Sequence[Method],
    identical: Mapping[str, dict[str, Any] | None],
) -> list[dict[str, Any]]:
    """One row for each method. With several categories each row has `categories`, the main figures of each."""
    categories = list(dict.fromkeys(run.category for run in runs))
    kinds = {method.name: method for method in methods}
    overall = _figures(runs, kinds)
    by_category = {name: _figures([r for r in runs if r.category == name], kinds) for name in categories}
    rows = []
    for name, figures in overall.items():
        method = kinds[name]
        speculator = method.arguments.get("speculator")
        row = {
            "method": name,
            "kind": method.kind,
            "spec": method.spec,
            "recorded_length": None if speculator is None else speculator.drafter.record.length,
            "batch_size": batch_size,
            "temperature": temperature,
            **figures,
            "identical": identical.get(name),
        }
        if len(categories) > 1:
            row["categories"] = {category: _brief(by_method[name]) for category, by_method in by_category.items()}
        rows.append(row)
    return rows


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest speculator of one temperature and its gain."""
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


def _figures(runs: Sequence[TimedRun], methods: Mapping[str, Method]) -> dict[str, dict[str, Any]]:
    """Method -> tokens/s, speed-up against every baseline, and a speculator's statistics."""
    seconds = {name: seconds_by_repeat(runs, name) for name in dict.fromkeys(run.method for run in runs)}
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
            "speculation": _speculation(runs, name),
        }
    return result


def _speculation(runs: Sequence[TimedRun], method: str) -> dict[str, Any] | None:
    all_stats = [run.stats for run in runs if run.method == method and run.stats is not None]
    if not all_stats:
        return None
    figures = merged(all_stats).to_dict()
    del figures["verdict"]  # it goes by an estimate, and here the speed-up is measured
    return figures


def _brief(figures: dict[str, Any]) -> dict[str, Any]:
    speculation = figures["speculation"] or {}
    kept = ("mean_acceptance_length", "acceptance_rate_by_depth")
    return {
        "tokens_per_second": figures["tokens_per_second"],
        "speedup": figures["speedup"],
        **{name: speculation[name] for name in kept if name in speculation},
    }


def _tokens_per_second(row: dict[str, Any]) -> float:
    return row["tokens_per_second"]["median"]
