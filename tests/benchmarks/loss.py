"""Costs of speculation on text that drafts badly, with drafters that are never right."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from hf_speculate.drafting import Drafter
from hf_speculate.speculator import Speculator, SpeculatorSpec
from hf_speculate.testing import EmptyDrafter, RandomDrafter
from hf_speculate_tools.bench.methods import Method, eager_method, speculator_method
from hf_speculate_tools.bench.runs import (
    TimedRun,
    batches,
    fixed_length,
    measure_in_turn,
    merged,
    num_steps,
)
from hf_speculate_tools.bench.workload import WorkloadSettings, describe_target, load_workload
from hf_speculate_tools.commands import Grid, Limit, NewTokens, Repeats, make_spec, progress

from .command import against_plain, run
from .scripted import AcceptanceProfile, Texts, plain_texts


HARD_PROMPTS = Path(__file__).with_name("hard_prompts.jsonl")


@dataclass(kw_only=True)
class LossSettings(WorkloadSettings):
    """Options; without `speculators`, only bad drafters are measured."""

    QUICK: ClassVar = {"max_new_tokens": 64, "repeats": 1}

    hard: Annotated[
        bool,
        typer.Option("--hard", help="Use the built-in questions that are hardest to draft for."),
    ] = False
    limit: Limit = None
    max_new_tokens: NewTokens = 256
    adaptive: Annotated[
        bool,
        typer.Option("--adaptive/--always", help="Let the policy stop drafting where it costs time, or always draft."),
    ] = True
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget before every call what the policy learnt in earlier calls.")
    ] = False
    repeats: Repeats = 7

    def with_prompts(self) -> LossSettings:
        """The settings with their prompts: all hard ones, or one of another kind."""
        if self.hard:
            return replace(self, prompts=[HARD_PROMPTS])
        return replace(self, limit=self.limit or 1)

    def specs(self) -> list[SpeculatorSpec]:
        return super().specs() if self.speculators else []


def bench_loss(settings: LossSettings) -> dict[str, Any]:
    """Measure what speculation costs when drafts are never accepted.

    Returns:
        JSON-serialisable: `rows` with `speedup` (plain seconds / seconds: 0.97 is a loss of 3 %), `worst`, the median
        of the prompt that loses most, and `drafted_share`, the share of rounds with a draft.
    """
    specs = settings.specs()
    workload = load_workload(settings.with_prompts())
    model = workload.model
    requests = batches(workload.prompts, 1, model.device)
    arguments = fixed_length(settings.max_new_tokens)
    texts = plain_texts(model, requests, arguments)
    drafters = bad_drafters(texts, workload.vocab_size)
    drafters |= {spec.label: make_spec(spec, model).drafter for spec in specs}
    methods = [eager_method(), *(_method(name, drafter, settings) for name, drafter in drafters.items())]
    with progress("loss", total=num_steps(len(methods), len(requests), settings.repeats)) as advance:
        runs = measure_in_turn(model, methods, requests, arguments, settings.repeats, advance)
    return {
        "bench": "loss",
        **workload.describe(),
        "max_new_tokens": settings.max_new_tokens,
        "repeats": settings.repeats,
        "adaptive": settings.adaptive,
        "fresh": settings.fresh,
        "plain_tokens_per_second": against_plain(runs, "eager")["tokens_per_second"]["median"],
        "rows": [figures(runs, name) for name in drafters],
    }


def figures(runs: Sequence[TimedRun], name: str) -> dict[str, Any]:
    """Row of one drafter."""
    stats = merged(run.stats for run in runs if run.method == name and run.stats is not None)
    rounds = stats.rounds + stats.rounds_without_draft
    return {
        "drafter": name,
        **against_plain(runs, name),
        "worst": _worst(runs, name),
        "drafted_share": stats.rounds / rounds if rounds else 0.0,
        "drafted_tokens": stats.drafted_tokens / max(stats.calls, 1),
        "accepted_tokens": stats.accepted_tokens / max(stats.calls, 1),
    }


def _worst(runs: Sequence[TimedRun], name: str) -> float:
    """Plain seconds over seconds of the prompt that loses most, median of its repeats."""
    seconds = {(run.method, run.request, run.repeat): run.seconds for run in runs}
    ratios: dict[int, list[float]] = {}
    for method, request, repeat in seconds:
        if method == name:
            ratio = seconds["eager", request, repeat] / seconds[name, request, repeat]
            ratios.setdefault(request, []).append(ratio)
    return min(map(statistics.median, ratios.values()))


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """A table with one line for each drafter."""
    how = "automatic switch" if result["adaptive"] else "always drafting"
    if result["fresh"]:
        how += ", nothing learnt from earlier calls"
    columns = {
        "drafter": "{drafter}",
        "x plain": "{speedup[median]:.3f}x",
        "(range)": "{speedup[min]:.2f}-{speedup[max]:.2f}",
        "worst\nprompt": "{worst:.3f}x",
        "rounds\nthat drafted": "{drafted_share:.1%}",
        "accepted tokens\na call": "{accepted_tokens:.0f} of {drafted_tokens:.0f}",
    }
    return [
        Grid.of(
            f"Text that drafts badly, {how}, {describe_target(result)}, greedy, median of {result['repeats']}",
            result["rows"],
            columns,
            caption=f"plain: {result['plain_tokens_per_second']:.1f} tokens/s",
        )
    ]


def bad_drafters(texts: Texts, vocab_size: int) -> dict[str, Drafter]:
    """Drafters that are never right.

    "random" drafts trees of random tokens, up to 12, of a new shape every round. "adversarial" drafts trees of 16 wrong
    tokens, 5 deep. "never" drafts nothing, which measures the engine alone.
    """
    wrong = AcceptanceProfile(rates=(0.0,) * 5, widths=(4, 3, 3, 3, 3))
    return {
        "random": RandomDrafter(vocab_size=vocab_size),
        "adversarial": wrong.drafter(texts, vocab_size=vocab_size),
        "never": EmptyDrafter(),
    }


def _method(name: str, drafter: Drafter, settings: LossSettings) -> Method:
    def speculator() -> Speculator:
        return Speculator(drafter, adaptive=settings.adaptive)

    if settings.fresh:
        return Method(name=name, kind="speculator", fresh=lambda: {"speculator": speculator()})
    return speculator_method(name, speculator())


if __name__ == "__main__":
    run(LossSettings, bench_loss, tables)
