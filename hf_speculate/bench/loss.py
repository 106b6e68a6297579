"""What speculation costs on text that drafts badly: the automatic switch against drafters that are never right."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..commands.grid import Grid
from ..commands.methods import Method, SpeculatorSpec, eager_method
from ..commands.timing import progress, spread
from ..drafter import Drafter
from ..errors import SpeculateError
from ..models import GenerativeModel
from ..speculator import Speculator
from ..testing import EmptyDrafter, RandomDrafter
from .profiles import AcceptanceProfile
from .runs import (
    Request,
    Run,
    batches,
    fixed_length,
    measure_in_turn,
    merged,
    num_steps,
    seconds_by_repeat,
)
from .synthetic_workload import plain_texts
from .workload import WorkloadSettings, check_counts, describe_target, load_workload


# What is drafted by whom; none is ever right.
BAD_DRAFTERS = {
    "random": "trees of random tokens, up to 12 nodes, another shape every round",
    "adversarial": "trees of 16 nodes, 5 deep, without one right token",
    "never": "no draft at all: what the engine itself costs",
}


@dataclass(kw_only=True)
class LossSettings(WorkloadSettings):
    """What to measure.

    Attributes:
        drafters: of `BAD_DRAFTERS`.
        speculators: real ones beside them; None is none.
        adaptive: whether the automatic switch is on.
        fresh: every call begins without what earlier ones taught.
        repeats: interleaved passes over the prompts.
    """

    drafters: Sequence[str] = tuple(BAD_DRAFTERS)
    limit: int | None = 1
    max_new_tokens: int = 256
    adaptive: bool = True
    fresh: bool = False
    repeats: int = 7

    def specs(self) -> list[SpeculatorSpec]:
        return super().specs() if self.speculators else []

    def check(self) -> None:
        check_counts(max_new_tokens=self.max_new_tokens, repeats=self.repeats, limit=self.limit)
        if unknown := [name for name in self.drafters if name not in BAD_DRAFTERS]:
            raise SpeculateError(f"no bad drafter {', '.join(unknown)}; there are {', '.join(BAD_DRAFTERS)}.")


def bench_loss(settings: LossSettings) -> dict[str, Any]:
    """Greedy speed beside stock `generate`, as medians over interleaved passes.

    Returns:
        JSON-serialisable: `rows` with `speedup` (plain seconds / seconds: 0.97 is a loss of 3 %),
        `speedup_without_drafter_prefill`, where what the drafter did with the prompt is left out, and `drafted_share`
        of the rounds that drafted at all.
    """
    settings.check()
    specs = settings.specs()
    workload = load_workload(settings)
    model = workload.model
    requests = batches(workload.prompts, 1, model.device)
    arguments = fixed_length(settings.max_new_tokens)
    drafters = _drafters(settings.drafters, model, requests, arguments)
    drafters |= {spec.label: spec.make(model).drafter for spec in specs}
    methods = [eager_method(), *(_method(name, drafter, settings) for name, drafter in drafters.items())]

    def forget(method: Method) -> None:
        if settings.fresh and method.kind == "speculator":
            method.arguments["speculator"] = Speculator(drafters[method.name], adaptive=settings.adaptive)

    with progress("loss", total=num_steps(len(methods), len(requests), settings.repeats)) as advance:
        runs = measure_in_turn(model, methods, requests, arguments, settings.repeats, advance, before_each=forget)
    return {
        "bench": "loss",
        **workload.describe(),
        "max_new_tokens": settings.max_new_tokens,
        "repeats": settings.repeats,
        "adaptive": settings.adaptive,
        "fresh": settings.fresh,
        "plain_tokens_per_second": _plain_rate(runs),
        "rows": [figures(runs, name) for name in drafters],
    }


def figures(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """One drafter's row."""
    plain, ours = seconds_by_repeat(runs, "eager"), seconds_by_repeat(runs, name)
    without = seconds_by_repeat(runs, name, _without_drafter_prefill)
    stats = merged(run.stats for run in runs if run.method == name and run.stats is not None)
    rounds = stats.rounds + stats.rounds_without_draft
    return {
        "drafter": name,
        "speedup": spread([p / s for p, s in zip(plain, ours, strict=True)]),
        "speedup_without_drafter_prefill": spread([p / s for p, s in zip(plain, without, strict=True)]),
        "drafter_prefill_ms": 1e3 * stats.drafter_prefill_seconds / max(stats.calls, 1),
        "drafted_share": stats.rounds / rounds if rounds else 0.0,
        "drafted_tokens": stats.drafted_tokens / max(stats.calls, 1),
        "accepted_tokens": stats.accepted_tokens / max(stats.calls, 1),
    }


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """One line a drafter."""
    how = "automatic switch" if result["adaptive"] else "always drafting"
    if result["fresh"]:
        how += ", nothing learnt from earlier calls"
    columns = ["drafter", "x plain", "(range)", "x plain, drafter's\nprefill apart", "rounds\nthat drafted"]
    rows = []
    for row in result["rows"]:
        found, apart = row["speedup"], row["speedup_without_drafter_prefill"]
        rows.append(
            [
                row["drafter"],
                f"{found['median']:.3f}x",
                f"{found['min']:.2f}-{found['max']:.2f}",
                f"{apart['median']:.3f}x",
                f"{row['drafted_share']:.1%}",
                f"{row['accepted_tokens']:.0f} of {row['drafted_tokens']:.0f}",
            ]
        )
    return [
        Grid(
            title=f"Text that drafts badly, {how}, {describe_target(result)}, greedy, median of {result['repeats']}",
            columns=[*columns, "accepted tokens\na call"],
            rows=rows,
            words={"drafter"},
            caption=f"plain: {result['plain_tokens_per_second']:.1f} tokens/s",
        )
    ]


def _drafters(
    names: Sequence[str], model: GenerativeModel, requests: Sequence[Request], arguments: dict[str, Any]
) -> dict[str, Drafter]:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    made: dict[str, Drafter] = {}
    for name in names:
        if name == "random":
            made[name] = RandomDrafter(vocab_size=vocab_size)
        elif name == "never":
            made[name] = EmptyDrafter()
        else:
            profile = AcceptanceProfile(rates=(0.0,) * 5, widths=(4, 3, 3, 3, 3))
            made[name] = profile.drafter(plain_texts(model, requests, arguments), vocab_size=vocab_size)
    return made


def _method(name: str, drafter: Drafter, settings: LossSettings) -> Method:
    speculator = Speculator(drafter, adaptive=settings.adaptive)
    return Method(name=name, kind="speculator", arguments={"speculator": speculator})


def _without_drafter_prefill(run: Run) -> float:
    return run.seconds - (run.stats.drafter_prefill_seconds if run.stats else 0.0)


def _plain_rate(runs: Sequence[Run]) -> float:
    return statistics.median(run.num_tokens / run.seconds for run in runs if run.method == "eager")
