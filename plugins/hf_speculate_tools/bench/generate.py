"""`bench generate` and `bench batch`: tokens per second next to stock `generate`; the package defines the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hf_speculate.target import GenerativeModel

from ..commands import Grid, by_depth, check_temperatures, progress
from .identity import compare_texts
from .methods import (
    Method,
    compiled_method,
    draft_model_of,
    eager_method,
    speculator_methods,
    stock_speculative_methods,
)
from .replay import record_budgets
from .runs import batches, fixed_length, generate_once, measure_in_turn, num_steps, without_refused
from .settings import BatchSettings, GenerateSettings
from .summary import headline, summarize
from .workload import Workload, describe_target, load_workload


_COLUMNS = {
    "batch": "{batch_size:d}",
    "T": "{temperature:g}",
    "method": "{method}",
    "tokens/s": "{tokens_per_second[median]:.1f}",
    "(range)": "{tokens_per_second[min]:.0f}-{tokens_per_second[max]:.0f}",
    "x\neager": "{speedup[eager]:.2f}x",
    "x stock\ncompiled": "{speedup[stock compiled]:.2f}x",
    "x best\nstock": "{speedup[best_stock_speculative]:.2f}x",
    "mean\nacceptance\nlength": "{speculation[mean_acceptance_length]:.2f}",
    "engine\nefficiency": "{speculation[engine_efficiency]:.3f}",
    "same\ntext": "{identical[share]:.0%}",
}


def bench_generate(settings: GenerateSettings) -> dict[str, Any]:
    """Measure tokens per second of speculators and of stock generate.

    Stock runs eager and compiled, with prompt lookup and with an assistant model.

    Returns:
        JSON-serialisable: `rows`, one for each method, batch size and temperature; `temperatures`, for each temperature
        the fastest speculator (at the first batch size) with its `speedup` over `eager` and `best_stock_speculative`;
        and `speedup`, that of the first temperature. A row's `recorded_length` is the mean acceptance length in the
        training of its head.
    """
    check_temperatures(*settings.temperatures)
    specs = settings.specs()  # what cannot be read is said before a model is loaded
    workload = load_workload(settings)
    ours = speculator_methods(specs, workload.model)
    longest = max(len(ids) for _, ids in workload.prompts) + settings.max_new_tokens
    methods = _methods(settings, ours, workload.model, longest)
    if settings.seconds is not None:
        workload = _within(settings.seconds, workload, len(methods), settings.max_new_tokens)
    rows = _rows(settings, workload, methods)
    first_size = settings.batch_sizes[0]
    headlines = {
        f"{t:g}": headline([r for r in rows if r["temperature"] == t and r["batch_size"] == first_size])
        for t in settings.temperatures
    }
    return {
        "bench": "generate",
        **workload.describe(),
        "max_new_tokens": settings.max_new_tokens,
        "repeats": settings.repeats,
        "rows": rows,
        "temperatures": headlines,
        "speedup": next(iter(headlines.values()))["speedup"],
    }


def _within(seconds: float, workload: Workload, num_methods: int, max_new_tokens: int) -> Workload:
    """The workload with as many of its prompts as all methods can be measured on in this time, at least two."""
    first, *_ = batches(workload.prompts, 1, workload.model.device)
    calls = [generate_once(workload.model, eager_method(), first, fixed_length(max_new_tokens)) for _ in range(2)]
    count = int(seconds / (num_methods * min(call.seconds for call in calls)))  # the first call warms up
    return replace(workload, prompts=workload.prompts[: max(count, 2)])


def _rows(settings: GenerateSettings, workload: Workload, methods: Sequence[Method]) -> list[dict[str, Any]]:
    """Rows of all methods at every batch size and temperature."""
    model = workload.model
    requests = {size: batches(workload.prompts, size, model.device) for size in settings.batch_sizes}
    cells = [(size, temperature) for size in settings.batch_sizes for temperature in settings.temperatures]
    shared = fixed_length(settings.max_new_tokens)
    active = {
        size: without_refused(model, [method for method in methods if method.runs_at(size)], requests[size][0], shared)
        for size in settings.batch_sizes
    }
    total = sum(
        num_steps(len(active[size]), len(requests[size]), settings.repeats) + len(active[size]) for size, _ in cells
    )
    rows: list[dict[str, Any]] = []
    with progress("generate", total=total) as advance:
        for size, temperature in cells:
            where = f"batch {size}, T={temperature:g}"

            def step(what: str, where: str = where) -> None:
                advance(f"{where}, {what}")

            arguments = fixed_length(settings.max_new_tokens, temperature)
            runs = measure_in_turn(model, active[size], requests[size], arguments, settings.repeats, step)
            identical = {}
            for method in active[size]:
                comparison = compare_texts(model, method, runs, requests[size], arguments, settings.max_proofs)
                identical[method.name] = comparison
                step(f"{method.name} compared")
            rows += summarize(size, temperature, runs, active[size], identical)
    return rows


def _methods(settings: GenerateSettings, ours: Sequence[Method], model: GenerativeModel, longest: int) -> list[Method]:
    compiles = model.device.type != "cpu" if settings.compile_baseline is None else settings.compile_baseline
    for method in ours:
        record_budgets(method.arguments["speculator"])
    baselines = [eager_method(), *([compiled_method()] if compiles else [])]
    if settings.stock_speculative:
        num_lookup = settings.prompt_lookup_num_tokens
        baselines += stock_speculative_methods(
            draft_model_of(ours), num_lookup, longest + num_lookup if compiles else None
        )
    return [*baselines, *ours]


def bench_batch(settings: BatchSettings) -> dict[str, Any]:
    """Measure throughput at several batch sizes, with speculators and without.

    Every speculator runs twice: with the policy that stops drafting, and without.

    Returns:
        The result of `bench_generate`; every speculator runs twice, adaptive and with fixed drafts.
    """
    texts = [spec.text for spec in settings.specs()]
    both = [f"{text}{',' if ':' in text else ':'}adaptive={how}" for text in texts for how in ("true", "false")]
    given: dict[str, Any] = vars(settings) | {"speculators": both}
    only = GenerateSettings(**given, compile_baseline=False, stock_speculative=False, max_proofs=0)
    return bench_generate(only) | {"bench": "batch"}


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """Tables of all methods and of speed-ups by category, if there are several; then details, a line each."""
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
        for divergence in row["identical"]["divergences"]:
            place = f"prompt {divergence['prompt']}, new token {divergence['step']}"
            lines.append(f"divergence  {where}: {place}{_verdict(divergence)}")
    return ["\n".join(lines)]


def _verdict(divergence: dict[str, Any]) -> str:
    if "is_tie" not in divergence:
        return ""
    if divergence["is_tie"]:
        error = f"{divergence['logit_error']:.3g} of {divergence['max_logit']:.3g}"
        return f": a tie, margin {divergence['margin']:.3g}, logit error {error}"
    return f": {'NOT A TIE: ' if divergence['is_tie'] is False else ''}{divergence['why']}"


def _category(figures: dict[str, Any]) -> str:
    length = figures.get("mean_acceptance_length")
    return f"{figures['speedup']['eager']:.2f}x" + (f" ({length:.2f})" if length else "")
