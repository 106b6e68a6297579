"""The listeners of a round: statistics, records, the drafter, and the policy, which learns what pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..drafting import Drafting
from ..forward import Scorer
from ..policy import PolicySession
from ..stats import SpeculationStats
from ..target import layer_windows
from ..tree import Round
from ..verification import Sampler, Sequences


Listener = Callable[[Round, Any], None]
"""A function that is called after every round, with the output of its forward."""


def round_listeners(
    stats: SpeculationStats,
    sampler: Sampler,
    sequences: Sequences,
    scorer: Scorer,
    drafting: Drafting,
    policy: PolicySession,
) -> Sequence[Listener]:
    """The listeners of one request, in the order in which they are called."""
    records = sampler.records
    windows = layer_windows(scorer.model.config) if records.forward_kwargs else ()

    def count(round: Round, _output: Any) -> None:
        stats.add(round)
        for source in drafting.sources(round):
            stats.accepted_by_source[source] += 1

    def record(round: Round, output: Any) -> None:
        records.add_round(round, output, sequences.num_emitted, windows, scorer.whole_output)

    def observe(round: Round, output: Any) -> None:
        with stats.timed("drafter_seconds"):
            drafting.observe_choices(round, output.logits, sampler)
            drafting.observe(round, output.hidden_states, getattr(output, "along", None))

    def learn(round: Round, _output: Any) -> None:
        if any(round.tokens):
            policy.learn(round)

    return [count, record, observe, learn] if records.forward_kwargs else [count, observe, learn]
