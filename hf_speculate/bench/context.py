"""Speed over plain decoding as the context grows: automatic trees beside a fixed one. Random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from ..commands.environment import environment, find_device, find_dtype
from ..commands.grid import Grid, number
from ..commands.methods import Method, eager_method
from ..commands.shapes import find_shape, random_prompt
from ..commands.timing import progress, spread
from ..models import GenerativeModel
from .profiles import DEFAULT_RATES, AcceptanceProfile, read_profile
from .runs import (
    Run,
    batches,
    fixed_length,
    measure_in_turn,
    merged,
    num_steps,
    seconds_by_repeat,
)
from .synthetic_workload import plain_texts, synthetic_methods, synthetic_names
from .workload import check_counts


@dataclass(kw_only=True)
class ContextSettings:
    """What to measure.

    Attributes:
        contexts: cache entries before the first new token.
        shape: see `shapes.SHAPES`.
        layers: fewer than the shape has.
        profile: acceptance, and the nodes of the fixed tree; the automatic one may draft fewer.
        max_new_tokens: of every call.
        repeats: interleaved.
    """

    contexts: Sequence[int] = (256, 2048, 8192, 16384)
    shape: str = "0.5B"
    layers: int | None = None
    profile: AcceptanceProfile = field(default_factory=lambda: read_profile(DEFAULT_RATES, 16))
    dtype: str = "bfloat16"
    max_new_tokens: int = 48
    repeats: int = 3
    device: str | None = None


class _FilledCache:
    """Entries of a context nobody wrote: they cost what real ones cost, and no prefill of 16384 tokens is needed."""

    def __init__(self, model: GenerativeModel, length: int):
        config = model.config
        size = (1, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads)
        generator = torch.Generator(model.device).manual_seed(2)
        self._states = [
            torch.randn(size, generator=generator, device=model.device).to(model.dtype)
            for _ in range(2 * config.num_hidden_layers)
        ]
        self._config = config

    def copy(self) -> DynamicCache:
        cache = DynamicCache(config=self._config)
        for index in range(len(self._states) // 2):
            cache.update(self._states[2 * index].clone(), self._states[2 * index + 1].clone(), index)
        return cache


def bench_context(settings: ContextSettings) -> dict[str, Any]:
    """Greedy tokens/s over plain decoding at every context, prefill left out.

    Returns:
        JSON-serialisable: `rows`, one a context and method, with `speedup`, `mean_acceptance_length` and
        `drafted_nodes` a round with a draft, and the share of the rounds that drafted.
    """
    check_counts(context=min(settings.contexts), max_new_tokens=settings.max_new_tokens, repeats=settings.repeats)
    on = find_device(settings.device)
    shape = find_shape(settings.shape).with_layers(settings.layers)
    model = shape.build(find_dtype(settings.dtype), on)
    rows: list[dict[str, Any]] = []
    names = ("eager", *synthetic_names(settings.profile))
    total = len(settings.contexts) * num_steps(len(names), 1, settings.repeats)
    with progress("context", total=total) as advance:
        for context in sorted(settings.contexts):
            runs = _measure(model, context, settings, lambda step, c=context: advance(f"context {c}, {step}"))
            rows += [{"context": context, **figures(runs, name)} for name in names]
    return {
        "bench": "context",
        "shape": settings.shape,
        **asdict(shape),
        "dtype": settings.dtype,
        "acceptance": list(settings.profile.rates),
        "nodes": settings.profile.nodes,
        "max_new_tokens": settings.max_new_tokens,
        "repeats": settings.repeats,
        "rows": rows,
        "environment": environment(on),
    }


def figures(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """One method at one context."""
    plain, ours = seconds_by_repeat(runs, "eager"), seconds_by_repeat(runs, name)
    tokens = next(run.num_tokens for run in runs if run.method == name)
    found: dict[str, Any] = {
        "method": name,
        "tokens_per_second": spread([tokens / seconds for seconds in ours]),
        "speedup": spread([p / s for p, s in zip(plain, ours, strict=True)]),
    }
    stats = merged(run.stats for run in runs if run.method == name and run.stats is not None)
    if rounds := stats.rounds + stats.rounds_without_draft:
        found["mean_acceptance_length"] = stats.mean_acceptance_length
        found["drafted_nodes"] = stats.drafted_tokens / stats.rounds if stats.rounds else 0.0
        found["drafted_share"] = stats.rounds / rounds
    return found


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """One line a context."""
    rows = result["rows"]
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "eager"))
    cells = {(row["context"], row["method"]): row for row in rows}
    columns = ["context", "plain\ntokens/s"]
    for name in methods:
        columns += [f"{name}\nx plain", f"{name}\n(range)", f"{name}\nnodes a round"]
    lines = []
    for context in dict.fromkeys(row["context"] for row in rows):
        line = [f"{context}", f"{cells[context, 'eager']['tokens_per_second']['median']:.1f}"]
        for name in methods:
            row = cells[context, name]
            nodes = row.get("drafted_nodes", 0.0) * row.get("drafted_share", 0.0)
            speedup = row["speedup"]
            line += [f"{speedup['median']:.2f}x", f"{speedup['min']:.2f}-{speedup['max']:.2f}", number(nodes, ".1f")]
        lines.append(line)
    env = result["environment"]
    rates = " ".join(f"{rate:.2f}" for rate in result["acceptance"])
    return [
        Grid(
            title=f"Speed over plain decoding by context, {result['shape']} shape ({result['num_hidden_layers']} "
            f"layers), {result['dtype']}, {env['device']}, {env['threads']} threads, greedy, "
            f"{result['max_new_tokens']} new tokens, median of {result['repeats']}",
            columns=columns,
            rows=lines,
            caption=f"Synthetic drafter that costs nothing; its {result['nodes']} nodes are accepted to depth 1, 2, … "
            f"in {rates} of the rounds.",
        )
    ]


def _measure(model: GenerativeModel, context: int, settings: ContextSettings, advance) -> list[Run]:
    filled = _FilledCache(model, context)
    vocab_size = model.config.vocab_size
    prompt = random_prompt(context + 1, vocab_size)
    (request,) = batches([("random", prompt[0])], 1, model.device)
    arguments = fixed_length(settings.max_new_tokens)

    def refill(method: Method) -> None:
        method.arguments["past_key_values"] = filled.copy()

    texts = plain_texts(model, [request], arguments | {"past_key_values": filled.copy()})
    methods = [eager_method(), *synthetic_methods(texts, settings.profile, vocab_size)]
    return measure_in_turn(model, methods, [request], arguments, settings.repeats, advance, before_each=refill)
