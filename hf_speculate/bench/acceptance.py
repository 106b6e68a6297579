"""How much of fixed trees is accepted: several speculators side by side, no clock involved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..commands.grid import Grid, by_depth, group_breaks, number
from ..commands.methods import Method, SpeculatorSpec, default_specs
from ..commands.timing import progress
from ..models import GenerativeModel
from ..stats import SpeculationStats
from .runs import Request, batches, fixed_length, generate_once, merged
from .workload import WorkloadSettings, check_counts, check_temperatures, describe_target, load_workload


@dataclass(kw_only=True)
class AcceptanceSettings(WorkloadSettings):
    """What to measure.

    Attributes:
        nodes: sizes of the fixed trees (draft nodes, the root not counted). They become the drafter's option
            `max_nodes`, unless the speculator's own options say otherwise.
        temperatures: 0 is greedy.
        prompt_tokens: take so many tokens of each text, without chat template; None takes whole prompts.
        first_token: the first of these.
    """

    nodes: Sequence[int] = (8, 16, 32)
    temperatures: Sequence[float] = (0.0, 1.0)
    max_new_tokens: int = 96
    prompt_tokens: int | None = None
    first_token: int = 0

    def specs(self) -> list[SpeculatorSpec]:
        """As everywhere, but that the bundled draft model drafts trees too."""
        return super().specs() if self.speculators is not None else default_specs(self.target_name, branches=4)

    def check(self) -> None:
        check_counts(
            nodes=min(self.nodes),
            max_new_tokens=self.max_new_tokens,
            prompt_tokens=self.prompt_tokens,
            limit=self.limit,
        )
        check_temperatures(self.temperatures)


def bench_acceptance(settings: AcceptanceSettings) -> dict[str, Any]:
    """Mean acceptance length and acceptance by depth of every speculator, tree size and temperature.

    Texts end where the target ends them: what it would write behind that, no drafter was made for. Trees are fixed
    (`adaptive=False`), so that the figures do not depend on the machine's speed; they are repeatable but for near ties
    in 16 bit.

    Returns:
        JSON-serialisable: `rows` with `mean_acceptance_length` and its `standard_error` over the prompts (jackknife),
        `acceptance_rate_by_depth`, and `drafted_nodes`, what was really drafted a round: budgets at the end of the text
        and drafters that find less stay below `nodes`.
    """
    settings.check()
    specs = settings.specs()
    cut = None
    if settings.prompt_tokens is not None:
        cut = slice(settings.first_token, settings.first_token + settings.prompt_tokens)
    workload = load_workload(settings, cut)
    requests = batches(workload.prompts, 1, workload.model.device)
    rows = []
    total = len(specs) * len(settings.nodes) * len(settings.temperatures) * len(requests)
    with progress("acceptance", total=total) as advance:
        for temperature in settings.temperatures:
            arguments = fixed_length(settings.max_new_tokens, temperature) | {"eos_token_id": workload.eos_token_id}
            for spec in specs:
                for nodes in settings.nodes:
                    method = fixed_tree(spec, workload.model, nodes)
                    stats = []
                    for request in requests:
                        stats.append(_stats(workload.model, method, request, arguments))
                        advance(f"{spec.label}, {nodes} nodes, T={temperature:g}")
                    categories = [request.category for request in requests]
                    rows.append(
                        {"speculator": spec.label, "spec": spec.text, "nodes": nodes, "temperature": temperature}
                        | figures(stats, categories)
                    )
    return {
        "bench": "acceptance",
        **workload.describe(),
        "max_new_tokens": settings.max_new_tokens,
        "prompt_tokens": settings.prompt_tokens,
        "rows": rows,
    }


def fixed_tree(spec: SpeculatorSpec, target: GenerativeModel, nodes: int) -> Method:
    """A speculator that drafts trees of that many nodes every round."""
    speculator = spec.make(target, adaptive=False, max_nodes=nodes)
    return Method(name=spec.label, kind="speculator", arguments={"speculator": speculator}, spec=spec.text)


def figures(stats: Sequence[SpeculationStats], categories: Sequence[str]) -> dict[str, Any]:
    """The figures of one row from the statistics of its prompts."""
    whole = merged(stats)
    names = list(dict.fromkeys(categories))
    found: dict[str, Any] = {
        "mean_acceptance_length": whole.mean_acceptance_length,
        "standard_error": jackknife(stats),
        "acceptance_rate_by_depth": whole.acceptance_rate_by_depth,
        "accepted_to_depth": dict(sorted(whole.accepted_to_depth.items())),
        "drafted_nodes": whole.drafted_tokens / whole.rounds if whole.rounds else 0.0,
        "rounds": whole.rounds,
        "rounds_without_draft": whole.rounds_without_draft,
    }
    if len(names) > 1:
        found["categories"] = {
            name: merged([s for s, c in zip(stats, categories, strict=True) if c == name]).mean_acceptance_length
            for name in names
        }
    return found


def jackknife(stats: Sequence[SpeculationStats]) -> float | None:
    """Standard error of the mean acceptance length if prompts are a sample; None for fewer than two with drafts.

    Lengths of rounds within one text hang together, so prompts are what is left out, not rounds.
    """
    drafted = [s for s in stats if s.rounds]
    if len(drafted) < 2:
        return None
    tokens = [s.accepted_tokens + s.bonus_tokens for s in drafted]
    rounds = [s.rounds for s in drafted]
    without = [(sum(tokens) - t) / (sum(rounds) - r) for t, r in zip(tokens, rounds, strict=True)]
    mean, count = sum(without) / len(without), len(without)
    return (sum((value - mean) ** 2 for value in without) * (count - 1) / count) ** 0.5


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """One line a speculator, one column a temperature and size; and acceptance by depth."""
    rows = result["rows"]
    cells = {(row["speculator"], row["temperature"], row["nodes"]): row for row in rows}
    speculators = list(dict.fromkeys(row["speculator"] for row in rows))
    settings = list(dict.fromkeys((row["temperature"], row["nodes"]) for row in rows))
    cut = f" after {result['prompt_tokens']} of prompt" if result["prompt_tokens"] else ""
    lengths = Grid(
        title=f"Mean acceptance length of fixed trees, {describe_target(result)}{cut}",
        columns=["speculator", *(f"{_temperature(t)},\n{n} nodes" for t, n in settings)],
        words={"speculator"},
        rows=[[name, *(_length(cells[name, t, n]) for t, n in settings)] for name in speculators],
        caption="± is the standard error over the prompts.",
    )
    parts: list[Grid | str] = [lengths, _by_depth(rows)]
    if any("categories" in row for row in rows):
        parts.append(_by_category(rows))
    return parts


def _by_depth(rows: Sequence[dict[str, Any]]) -> Grid:
    return Grid(
        title="Acceptance rate by depth (unconditional)",
        columns=["T", "speculator", "nodes", "drafted\na round", "by depth"],
        words={"speculator", "by depth"},
        rows=[
            [
                f"{row['temperature']:g}",
                row["speculator"],
                f"{row['nodes']}",
                f"{row['drafted_nodes']:.1f}",
                by_depth(row["acceptance_rate_by_depth"]),
            ]
            for row in rows
        ],
        breaks=group_breaks([(row["temperature"], row["speculator"]) for row in rows]),
    )


def _by_category(rows: Sequence[dict[str, Any]]) -> Grid:
    names = list(rows[0]["categories"])
    return Grid(
        title="Mean acceptance length by category",
        columns=["T", "speculator", "nodes", *names],
        words={"speculator"},
        rows=[
            [f"{row['temperature']:g}", row["speculator"], f"{row['nodes']}"]
            + [number(row["categories"][name], ".2f") for name in names]
            for row in rows
        ],
        breaks=group_breaks([(row["temperature"], row["speculator"]) for row in rows]),
    )


def _temperature(value: float) -> str:
    return f"T={value:g}" if value else "greedy"


def _length(row: dict[str, Any]) -> str:
    error = row["standard_error"]
    return number(row["mean_acceptance_length"], ".2f") + ("" if error is None else f" ±{error:.2f}")


def _stats(model: GenerativeModel, method: Method, request: Request, arguments: dict[str, Any]) -> SpeculationStats:
    stats = generate_once(model, method, request, arguments).stats
    assert stats is not None
    return stats
