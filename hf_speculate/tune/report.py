"""What `hf-speculate tune` prints: cost curve, acceptance, candidates, prediction against measurement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from .running import Outcome, Prediction


_MAX_RANKS = 8
_MAX_DEPTHS = 12


def tables(outcome: Outcome) -> Iterator[RenderableType]:
    """The tables, in the order in which they explain each other."""
    yield cost_table(outcome)
    if outcome.tuning.ranks:
        yield rank_table(outcome)
    yield plan_table(outcome)


def cost_table(outcome: Outcome) -> Table:
    """Milliseconds of a round by nodes and context, and relative to a token of stock `generate`."""
    costs, drafting = outcome.costs, outcome.tuning.drafting
    rendered = _table(
        "Cost of a round without its draft, and of the draft: milliseconds (a token of stock generate = 1)",
        ("context", "stock token", *(f"{size - 1} nodes" for size in costs.rounds.sizes)),
    )
    for context, row in zip(costs.rounds.contexts, costs.rounds.seconds, strict=True):
        plain = costs.plain(1, context)
        rendered.add_row(f"{context}", f"{1e3 * plain:.2f}", *(_relative(seconds, plain) for seconds in row))
    levels = ", ".join(
        f"{depth}: {1e3 * drafting(depth, outcome.context):.2f}" for depth in drafting.sizes if depth <= _MAX_DEPTHS
    )
    rendered.caption = f"drafting to depth, context {outcome.context}, milliseconds: {levels}"
    return rendered


def rank_table(outcome: Outcome) -> Table:
    """Acceptance by depth and rank, with the number of occasions at each depth."""
    ranks = [row[:_MAX_RANKS] for row in outcome.tuning.ranks[:_MAX_DEPTHS]]
    width = max(map(len, ranks))
    rendered = _table(
        "Acceptance by depth and rank: how often the node of that rank was right, where the path to it was",
        ("depth", "rounds", *(f"rank {rank}" for rank in range(width)), "none"),
    )
    for depth, (row, trials) in enumerate(zip(ranks, outcome.rank_trials, strict=False), start=1):
        whole = outcome.tuning.ranks[depth - 1]
        none = 1 - sum(hit * trial for hit, trial in zip(whole, trials, strict=True)) / trials[0]
        cells = [f"{rate:.2f}" for rate in row] + [""] * (width - len(row))
        rendered.add_row(f"{depth}", f"{trials[0]}", *cells, f"{max(none, 0.0):.2f}")
    return rendered


def plan_table(outcome: Outcome) -> Table:
    """The candidates that were run, the chosen one marked."""
    rendered = _table(
        "Options, tokens and milliseconds of a round, and the predicted speed-up over stock generate",
        ("", "options", "tokens", "round", "outside of rounds", "predicted"),
    )
    for prediction in outcome.compared:
        chosen = prediction is outcome.best
        rendered.add_row(
            "*" if chosen else "",
            prediction.candidate.name,
            f"{prediction.tokens:.2f}",
            f"{1e3 * prediction.seconds:.2f}",
            f"{1e3 * prediction.outside:.1f}",
            f"{prediction.speedup:.2f}x",
            style="bold" if chosen else None,
        )
    if outcome.measured:
        rendered.caption = ", ".join(
            f"measured, {name}: {value:.2f}x (predicted {outcome.best.speedup / value - 1:+.1%})"
            for name, value in outcome.measured.items()
        )
    return rendered


def verdict(best: Prediction) -> str:
    """The choice in one sentence."""
    if best.speedup <= 1:
        return f"Speculation does not pay here: at best {best.speedup:.2f}x. Adaptive drafting will switch it off."
    return f"Chosen: {best.candidate.name}, predicted {best.speedup:.2f}x."


def _table(title: str, columns: tuple[Any, ...]) -> Table:
    rendered = Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        rendered.add_column(column, justify="left" if column == "options" else "right", overflow="fold")
    return rendered


def _relative(seconds: float, plain: float) -> str:
    return f"{1e3 * seconds:.2f} ({seconds / plain:.2f})"
