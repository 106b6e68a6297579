"""A draft model that drafts while the target verifies, beside one that waits for it; on the CPU.

Target and draft model have random weights, and the acceptance is set (`ScriptedDrafter`): costs are those of real
shapes. The row of a draft model on a device of its own is computed from the times that both models take alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any, ClassVar

import torch
import typer

from hf_speculate.speculator import Speculator
from hf_speculate.stats import SpeculationStats
from hf_speculate.target import GenerativeModel
from hf_speculate_gguf import load_model
from hf_speculate_plugins.draft_model import DraftModelDrafter, DraftModelOptions
from hf_speculate_tools.bench import fixed_length
from hf_speculate_tools.commands import Grid, Repeats, environment, find_dtype, progress

from ..support.random_gguf import FileShape
from .command import Context, Dtype, Rounds, random_file, run
from .scripted import AcceptanceProfile
from .shapes import ModelShape, Shape, find_shape, random_prompt


_CPU = torch.device("cpu")
WAITS, AHEAD, SIMULATED = "one after the other", "ahead", "ahead, on a device of its own (simulated)"
_PARTS = ("target_ms", "drafter_ms", "rest_ms")


@dataclass(kw_only=True)
class AheadSettings:
    """Options: how often a level is right where the one above it is, and how deep drafts are."""

    QUICK: ClassVar = {"rounds": 8, "repeats": 1}

    shape: Shape = "0.5B"
    rates: Annotated[list[float], typer.Option("--rate", help="Share of right levels (repeatable).")] = field(
        default_factory=lambda: [0.6, 0.8]
    )
    depths: Annotated[list[int], typer.Option("--depth", min=1, help="Tokens of a draft (repeatable).")] = field(
        default_factory=lambda: [2, 5]
    )
    kind: Annotated[str | None, typer.Option("--type", help="Packed weights: Q4_0, Q8_0 ... (default: dense).")] = None
    dtype: Dtype = "bfloat16"
    context: Context = 256
    rounds: Rounds = 24
    repeats: Repeats = 3


def bench_ahead(settings: AheadSettings) -> dict[str, Any]:
    """Greedy rounds of a draft model of half the target's width and layers, waiting and drafting ahead."""
    shape = find_shape(settings.shape)
    target, draft_model = (_model(each, settings.kind, settings.dtype) for each in (shape, half(shape)))
    prompt = random_prompt(settings.context, shape.vocab_size)
    cells = list(product(settings.rates, settings.depths))
    rows: list[dict[str, Any]] = []
    with progress("ahead", total=len(cells) * settings.repeats) as advance:
        for rate, depth in cells:
            profile = AcceptanceProfile(tuple(rate**level for level in range(1, depth + 1)), (1,) * depth)
            count = round(settings.rounds * profile.mean_length)
            text = target.generate(prompt, **fixed_length(count + depth + 2), speculator=None)[0, settings.context :]
            drafter = profile.drafter(
                {tuple(prompt[0].tolist()): text.tolist()},
                vocab_size=shape.vocab_size,
                paid=DraftModelDrafter(draft_model, DraftModelOptions(depth=depth)),
            )
            ways = {
                way: Speculator(drafter, adaptive=False, ahead=ahead) for way, ahead in ((WAITS, False), (AHEAD, True))
            }
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for repeat in range(settings.repeats + 1):  # the first is a warm-up
                for way, speculator in ways.items():
                    arguments = {**fixed_length(count), "return_dict_in_generate": True, "speculator": speculator}
                    found = _of_round(target.generate(prompt, **arguments).speculation)
                    if repeat:
                        runs[way].append(found)
                advance(f"{rate} to depth {depth}")
            rows += [{"rate": rate, "depth": depth, **row} for row in _summary(runs, depth)]
    return {
        "bench": "ahead",
        "shape": settings.shape,
        "weights": settings.kind or settings.dtype,
        "parameters": [each.num_parameters for each in (shape, half(shape))],
        "prompt_length": settings.context,
        "rows": rows,
        "environment": environment(_CPU),
    }


def half(shape: ModelShape) -> ModelShape:
    """The shape with half the width and half the layers."""
    return replace(
        shape,
        hidden_size=shape.hidden_size // 2,
        intermediate_size=shape.intermediate_size // 2,
        num_hidden_layers=max(shape.num_hidden_layers // 2, 1),
        num_attention_heads=shape.num_attention_heads // 2,
        num_key_value_heads=max(shape.num_key_value_heads // 2, 1),
    )


def simulated(waits: dict[str, float], share_right: float, depth: int) -> dict[str, float]:
    """A round where target and draft model compute side by side, each as fast as alone: a clock for each.

    A draft ahead has one level more. The round waits for a right one until it is there. Of a wrong one, the level that
    is being drafted has to end before the next draft begins.
    """
    target, drafter = waits["target_ms"], waits["drafter_ms"]
    level = drafter / depth
    ahead = drafter + level
    begun = -(-target // level) * level  # when the level ends that is being drafted at the verdict
    after_wrong = (begun - target if begun <= ahead else 0.0) + drafter
    waited = share_right * max(ahead - target, 0.0) + (1 - share_right) * after_wrong
    whole = target + waited + waits["rest_ms"]
    return {**waits, "drafter_ms": waited, "round_ms": whole, "share_right": share_right}


def _summary(runs: dict[str, list[dict[str, float]]], depth: int) -> list[dict[str, Any]]:
    rows = {way: {key: statistics.median(run[key] for run in found) for key in found[0]} for way, found in runs.items()}
    rows[SIMULATED] = simulated(rows[WAITS], rows[AHEAD]["share_right"], depth)
    plain = rows[WAITS]["round_ms"] / rows[WAITS]["tokens_per_round"]
    return [
        {"way": way, **row, "speedup": plain * row["tokens_per_round"] / row["round_ms"]} for way, row in rows.items()
    ]


def _of_round(stats: SpeculationStats) -> dict[str, float]:
    count = stats.target_forwards
    seconds = stats.target_seconds, stats.drafter_seconds, stats.rest_seconds
    return {
        **{name: 1e3 * part / count for name, part in zip(_PARTS, seconds, strict=True)},
        "round_ms": 1e3 * sum(seconds) / count,
        "tokens_per_round": stats.emitted_tokens / count,
        "share_right": stats.drafts_ahead_taken / max(stats.drafts_ahead, 1),
    }


def _model(shape: ModelShape, kind: str | None, dtype: str) -> GenerativeModel:
    if kind is None:
        return shape.build(find_dtype(dtype), _CPU)
    of_file = FileShape(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_hidden_layers,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        is_tied=shape.tie_word_embeddings,
    )
    with random_file(of_file, kind) as path:
        return load_model(path, dtype=find_dtype(dtype), device=_CPU)


def tables(result: dict[str, Any]) -> Sequence[Grid | str]:
    """The result as one table."""
    target, draft = (f"{size / 1e6:.0f} M" for size in result["parameters"])
    title = (
        f"A draft model ({draft}) ahead of its target ({target}, {result['shape']} shape), random weights, "
        f"{result['weights']}, context {result['prompt_length']}, {result['environment']['threads']} threads: "
        "milliseconds per round"
    )
    columns = {
        "a level\nis right": "{rate:.1f}",
        "depth": "{depth:d}",
        "drafts": "{way}",
        "round": "{round_ms:.1f}",
        "target": "{target_ms:.1f}",
        "waits for\nthe drafter": "{drafter_ms:.1f}",
        "rest": "{rest_ms:.1f}",
        "guesses\nright": lambda row: "" if row["way"] == WAITS else f"{row['share_right']:.0%}",
        "tokens\nper round": "{tokens_per_round:.2f}",
        "x waiting": "{speedup:.2f}x",
    }
    caption = "Acceptance is set. Simulated: each model as fast as alone, the guesses right as often as found."
    return [Grid.of(title, result["rows"], columns, groups=("rate", "depth"), caption=caption)]


if __name__ == "__main__":
    run(AheadSettings, bench_ahead, tables)
