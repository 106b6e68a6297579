"""`bench acceptance`: acceptance of fixed trees, several speculators side by side, no clock involved."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from hf_speculate.stats import SpeculationStats

from ..commands import Grid, by_depth, check_temperatures, progress
from .methods import speculator_methods
from .runs import batches, fixed_length, generate_once, merged
from .settings import AcceptanceSettings
from .workload import describe_target, load_workload


def bench_acceptance(settings: AcceptanceSettings) -> dict[str, Any]:
    """Measure how many drafts of each speculator are accepted. Times nothing.

    Texts end where the target ends them: no drafter was made for text after the end. Trees are fixed
    (`adaptive=False`), so the figures do not depend on the machine's speed. They are repeatable but for near ties in 16
    bit.

    Returns:
        JSON-serialisable: `rows` with `tokens_per_round` (of all rounds), `mean_acceptance_length` and its
        `standard_error` over the prompts (jackknife), `acceptance_rate_by_depth`, and `drafted_nodes` per round. The
        latter is below `nodes` at the end of a text and for drafters that find less.
    """
    check_temperatures(*settings.temperatures)
    specs = settings.specs()
    cut = None
    if settings.prompt_tokens is not None:
        cut = slice(settings.first_token, settings.first_token + settings.prompt_tokens)
    workload = load_workload(settings, cut)
    requests = batches(workload.prompts, 1, workload.model.device)
    rows = []
    total = len(specs) * len(settings.nodes) * len(settings.temperatures) * len(requests)
    with progress("acceptance", total=total) as advance:
        for temperature, spec, nodes in product(settings.temperatures, specs, settings.nodes):
            arguments = fixed_length(settings.max_new_tokens, temperature) | {"eos_token_id": workload.eos_token_id}
            (method,) = speculator_methods([spec], workload.model, adaptive=False, max_nodes=nodes)
            stats = []
            for request in requests:
                request_stats = generate_once(workload.model, method, request, arguments).stats
                assert request_stats is not None
                stats.append(request_stats)
                advance(f"{spec.label}, {nodes} nodes, T={temperature:g}")
            row = {"speculator": spec.label, "spec": spec.text, "nodes": nodes, "temperature": temperature}
            rows.append(row | figures(stats, [request.category for request in requests]))
    return {
        "bench": "acceptance",
        **workload.describe(),
        "max_new_tokens": settings.max_new_tokens,
        "prompt_tokens": settings.prompt_tokens,
        "rows": rows,
    }


def figures(stats: Sequence[SpeculationStats], categories: Sequence[str]) -> dict[str, Any]:
    """Figures of one row from the statistics of its prompts."""
    whole = merged(stats)
    names = list(dict.fromkeys(categories))
    row: dict[str, Any] = {
        "tokens_per_round": whole.tokens_per_round,
        "mean_acceptance_length": whole.mean_acceptance_length,
        "standard_error": jackknife(stats),
        "acceptance_rate_by_depth": whole.acceptance_rate_by_depth,
        "accepted_to_depth": dict(sorted(whole.accepted_to_depth.items())),
        "drafted_nodes": whole.drafted_tokens / whole.rounds if whole.rounds else 0.0,
        "rounds": whole.rounds,
        "rounds_without_draft": whole.rounds_without_draft,
    }
    if len(names) > 1:
        row["categories"] = {
            name: merged([s for s, c in zip(stats, categories, strict=True) if c == name]).mean_acceptance_length
            for name in names
        }
    return row


def jackknife(stats: Sequence[SpeculationStats]) -> float | None:
    """Standard error of the mean acceptance length if prompts are a sample; None for fewer than two with drafts.

    Lengths of rounds within one text depend on each other, so the jackknife leaves out prompts, not rounds.
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
    """A table with one line for each temperature, speculator and size."""
    rows = result["rows"]
    cut = f" after {result['prompt_tokens']} of prompt" if result["prompt_tokens"] else ""
    columns: dict[str, Any] = {
        "T": "{temperature:g}",
        "speculator": "{speculator}",
        "nodes": "{nodes:d}",
        "tokens\na round": "{tokens_per_round:.2f}",
        "mean acceptance\nlength": "{mean_acceptance_length:.2f}",
        "±": "{standard_error:.2f}",
        "drafted\na round": "{drafted_nodes:.1f}",
        "by depth": lambda row: by_depth(row["acceptance_rate_by_depth"]),
    }
    columns |= {name: f"{{categories[{name}]:.2f}}" for name in rows[0].get("categories", ())}
    return [
        Grid.of(
            f"Acceptance of fixed trees, {describe_target(result)}{cut}",
            rows,
            columns,
            groups=("temperature", "speculator"),
            caption="tokens per round: rounds without a draft included, which the mean acceptance length leaves out; ± "
            "is its standard error over the prompts; by depth: unconditional rates.",
        )
    ]
