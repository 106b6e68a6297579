"""Tokens per second of speculators beside stock `generate`, on real prompts. Definitions: the package's docstring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import typer

from ..commands import (
    SHAPES,
    BatchSizes,
    Exact,
    Layers,
    NewTokens,
    Rates,
    Repeats,
    Temperatures,
    check_counts,
    check_temperatures,
    progress,
    target_path,
)
from ..errors import SpeculateError
from ..models import GenerativeModel
from ..registry import SpeculatorSpec
from .engines import LlamaCppPython, OpenVinoPython, engine_methods
from .identity import compare_texts
from .methods import (
    Method,
    compiled_method,
    draft_model_of,
    eager_method,
    scripted_methods,
    speculator_methods,
    stock_speculative_methods,
)
from .profiles import DEFAULT_RATES, read_profile
from .replay import record_budgets
from .runs import (
    batches,
    fixed_length,
    measure_in_turn,
    num_steps,
    plain_texts,
)
from .summary import headline, summarize
from .workload import Workload, WorkloadSettings, load_workload, shape_workload


@dataclass(kw_only=True)
class GenerateSettings(WorkloadSettings):
    """What to measure.

    Every pair of batch size and temperature is measured (default: greedy and 1; a shape: greedy). Stock's speculative
    modes run at batch 1, and not at a shape: a random target repeats itself. `max_proofs` divergences of a speculator
    are looked at again.
    """

    QUICK: ClassVar = {"limit": 2, "max_new_tokens": 48, "repeats": 2}

    shape: Annotated[
        str | None,
        typer.Option(help=f"Random weights and a scripted drafter instead of a target: {', '.join(SHAPES)}."),
    ] = None
    layers: Layers = None
    acceptance: Rates = DEFAULT_RATES
    nodes: Annotated[int, typer.Option(min=1, help="Of the scripted drafter's trees.")] = 16
    batch_sizes: BatchSizes = field(default_factory=lambda: [1])
    temperatures: Temperatures = field(default_factory=list)
    max_new_tokens: NewTokens = 128
    repeats: Repeats = 3
    compile_baseline: Annotated[
        bool | None,
        typer.Option(
            "--compile-baseline/--no-compile-baseline",
            help="Stock with static cache and torch.compile too (default: on accelerators).",
        ),
    ] = None
    prompt_lookup_num_tokens: Annotated[
        int, typer.Option("--lookup-tokens", min=1, help="prompt_lookup_num_tokens of stock.")
    ] = 10
    exact: Exact = False
    llama_cpp: LlamaCppPython = None
    openvino: OpenVinoPython = None
    stock_speculative: bool = True
    max_proofs: int = 8

    def __post_init__(self) -> None:
        self.temperatures = self.temperatures or ([0.0, 1.0] if self.shape is None else [0.0])

    def specs(self) -> list[SpeculatorSpec]:
        return [spec.with_option("exact", True) if self.exact else spec for spec in super().specs()]

    def check(self) -> None:
        """Raises `SpeculateError` for values that cannot be measured."""
        check_counts(max_new_tokens=self.max_new_tokens, repeats=self.repeats, batch_size=min(self.batch_sizes))
        check_temperatures(*self.temperatures)
        given = self.target or self.speculators or self.prompts or self.exact or any(self.temperatures)
        if self.shape is not None and given:
            raise SpeculateError(
                "a shape with random weights takes no target, speculators, prompts or --exact, and is measured "
                "greedily."
            )


def bench_generate(settings: GenerateSettings) -> dict[str, Any]:
    """Tokens per second of speculators beside stock eager, compiled, prompt lookup and assisted generation.

    Returns:
        JSON-serialisable: `rows`, one for each method, batch size and temperature; `temperatures`, for each temperature
        the fastest speculator (at the first batch size) with its `speedup` over `eager` and `best_stock_speculative`;
        and `speedup`, that of the first temperature.
    """
    settings.check()
    workload, ours = _subject(settings)
    longest = max(len(ids) for _, ids in workload.prompts) + settings.max_new_tokens
    with engine_methods(settings.llama_cpp, settings.openvino, target_path(workload.name), longest) as others:
        rows = _rows(settings, workload, [*_methods(settings, ours, workload.model), *others])
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


def _rows(settings: GenerateSettings, workload: Workload, methods: Sequence[Method]) -> list[dict[str, Any]]:
    """All methods at every batch size and temperature."""
    model = workload.model
    requests = {size: batches(workload.prompts, size, model.device) for size in settings.batch_sizes}
    cells = [(size, temperature) for size in settings.batch_sizes for temperature in settings.temperatures]
    active = {size: [method for method in methods if method.runs_at(size)] for size in settings.batch_sizes}
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
                found = compare_texts(model, method, runs, requests[size], arguments, settings.max_proofs)
                identical[method.name] = found
                step(f"{method.name} compared")
            rows += summarize(size, temperature, runs, active[size], identical)
    return rows


def _subject(settings: GenerateSettings) -> tuple[Workload, list[Method]]:
    """Target with prompts, and speculators: real ones or scripted ones."""
    if settings.shape is None:
        specs = settings.specs()  # what cannot be read is said before a model is loaded
        workload = load_workload(settings)
        return workload, speculator_methods(specs, workload.model)
    profile = read_profile(settings.acceptance or DEFAULT_RATES, settings.nodes)
    workload = shape_workload(settings.shape, settings.layers, settings.limit, settings.dtype, settings.device)
    requests = batches(workload.prompts, 1, workload.model.device)
    texts = plain_texts(workload.model, requests, fixed_length(settings.max_new_tokens))
    return workload, scripted_methods(texts, profile, workload.vocab_size)


def _methods(settings: GenerateSettings, ours: Sequence[Method], model: GenerativeModel) -> list[Method]:
    compiles = settings.compile_baseline
    for method in ours:
        record_budgets(method.arguments["speculator"])
    baselines = [eager_method()]
    if compiles if compiles is not None else model.device.type != "cpu":
        baselines.append(compiled_method())
    if settings.stock_speculative and settings.shape is None:
        baselines += stock_speculative_methods(draft_model_of(ours), settings.prompt_lookup_num_tokens)
    return [*baselines, *ours]
