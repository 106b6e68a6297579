"""`hf-speculate bench ahead`: a draft model that drafts while the target verifies, beside one that waits for it.

Target and draft model have random weights, and the acceptance is set (`ScriptedDrafter`): costs are those of real
shapes. What a device of its own would give the draft model is computed from what both take alone, and says so.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import torch
import typer

from hf_speculate.bench import AcceptanceProfile, fixed_length
from hf_speculate.commands import (
    Context,
    Dtype,
    Grid,
    JsonOnly,
    Markdown,
    ModelShape,
    Out,
    Repeats,
    Rounds,
    Shape,
    Threads,
    check_counts,
    environment,
    find_dtype,
    find_shape,
    prepare,
    progress,
    random_prompt,
    ratio,
    report,
)
from hf_speculate.models import GenerativeModel
from hf_speculate.speculator import Speculator
from hf_speculate.stats import SpeculationStats

from ..draft_model import DraftModelDrafter, DraftModelOptions


_CPU = torch.device("cpu")
WAITS, AHEAD, SIMULATED = "one after the other", "ahead", "ahead, on a device of its own (simulated)"
_PARTS = ("target_ms", "drafter_ms", "rest_ms")


def measure_ahead(
    shape_name: str = "0.5B",
    *,
    rates: Sequence[float] = (0.6, 0.8),
    depths: Sequence[int] = (2, 5),
    kind: str | None = None,
    dtype: str = "bfloat16",
    prompt_length: int = 256,
    rounds: int = 24,
    repeats: int = 3,
) -> dict[str, Any]:
    """Times greedy rounds of a draft model of half the target's width and layers, on the CPU.

    Args:
        rates: how often a level is right where the one above it is.
        depths: tokens of a chain.
        kind: of packed weights (Q4_0, Q8_0, …) of both models; None: dense.
        rounds: about as many are timed.
    Returns:
        JSON-serialisable. For every rate, depth and way (`WAITS`, `AHEAD`, `SIMULATED`) medians: `round_ms`
        with its parts, `tokens_a_round`, `share_right` of the drafts ahead, and `speedup` over `WAITS`.
    """
    check_counts(prompt_length=prompt_length, rounds=rounds, repeats=repeats, depth=min(depths))
    shape = find_shape(shape_name)
    target, draft_model = (_model(each, kind, dtype) for each in (shape, half(shape)))
    prompt = random_prompt(prompt_length, shape.vocab_size)
    rows: list[dict[str, Any]] = []
    with progress("ahead", total=len(rates) * len(depths) * repeats) as advance:
        for rate in rates:
            for depth in depths:
                profile = AcceptanceProfile(tuple(rate**level for level in range(1, depth + 1)), (1,) * depth)
                count = round(rounds * profile.mean_length)
                text = target.generate(prompt, **fixed_length(count + depth + 2), speculator=None)[0, prompt_length:]
                drafter = profile.drafter(
                    {tuple(prompt[0].tolist()): text.tolist()},
                    vocab_size=shape.vocab_size,
                    paid=DraftModelDrafter(draft_model, DraftModelOptions(depth=depth)),
                )
                ways = {
                    way: Speculator(drafter, adaptive=False, ahead=ahead)
                    for way, ahead in ((WAITS, False), (AHEAD, True))
                }
                runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
                for repeat in range(repeats + 1):  # the first is a warm-up
                    for way, speculator in ways.items():
                        arguments = {**fixed_length(count), "return_dict_in_generate": True, "speculator": speculator}
                        found = _of_round(target.generate(prompt, **arguments).speculation)
                        if repeat:
                            runs[way].append(found)
                    advance(f"{rate} to depth {depth}")
                rows += [{"rate": rate, "depth": depth, **row} for row in _summary(runs, depth)]
    return {
        "bench": "ahead",
        "shape": shape_name,
        "weights": kind or dtype,
        "parameters": [each.num_parameters for each in (shape, half(shape))],
        "prompt_length": prompt_length,
        "rows": rows,
        "environment": environment(_CPU),
    }


def half(shape: ModelShape) -> ModelShape:
    """Half the width, half the layers."""
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

    A draft ahead has one level more. One that was right is waited for until it is there; of a wrong one the level that
    is being drafted has to end before the next draft begins.
    """
    target, drafter = waits["target_ms"], waits["drafter_ms"]
    level = drafter / depth
    ahead = drafter + level
    begun = -(-target // level) * level  # when the level ends that is being drafted at the verdict
    after_wrong = (begun - target if begun <= ahead else 0.0) + drafter
    waited = share_right * max(ahead - target, 0.0) + (1 - share_right) * after_wrong
    return {
        **waits,
        "drafter_ms": waited,
        "round_ms": target + waited + waits["rest_ms"],
        "share_right": share_right,
    }


def _summary(runs: dict[str, list[dict[str, float]]], depth: int) -> list[dict[str, Any]]:
    rows = {way: {key: statistics.median(run[key] for run in found) for key in found[0]} for way, found in runs.items()}
    rows[SIMULATED] = simulated(rows[WAITS], rows[AHEAD]["share_right"], depth)
    plain = rows[WAITS]["round_ms"] / rows[WAITS]["tokens_a_round"]
    return [
        {"way": way, **row, "speedup": plain * row["tokens_a_round"] / row["round_ms"]} for way, row in rows.items()
    ]


def _of_round(stats: SpeculationStats) -> dict[str, float]:
    count = stats.target_forwards
    seconds = stats.target_seconds, stats.drafter_seconds, stats.rest_seconds
    return {
        **{name: 1e3 * part / count for name, part in zip(_PARTS, seconds, strict=True)},
        "round_ms": 1e3 * sum(seconds) / count,
        "tokens_a_round": stats.emitted_tokens / count,
        "share_right": stats.drafts_ahead_taken / max(stats.drafts_ahead, 1),
    }


def _model(shape: ModelShape, kind: str | None, dtype: str) -> GenerativeModel:
    if kind is None:
        return shape.build(find_dtype(dtype), _CPU)
    from hf_speculate.gguf import FileShape, find_recipe, load_model, write_random_file

    sizes = asdict(shape)
    names = {
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "is_tied": "tie_word_embeddings",
    }
    same = {name: sizes[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    of_file = FileShape(**same, **{name: sizes[source] for name, source in names.items()})
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "random.gguf")
        write_random_file(path, of_file, find_recipe(kind, of_file))
        return load_model(path, dtype=find_dtype(dtype), device=_CPU)


def tables(result: dict[str, Any]) -> list[Grid | str]:
    """The result as one table."""
    target, draft = (f"{size / 1e6:.0f} M" for size in result["parameters"])
    rows = [
        [
            f"{row['rate']:.1f}",
            str(row["depth"]),
            row["way"],
            *(f"{row[name]:.1f}" for name in ("round_ms", *_PARTS)),
            "" if row["way"] == WAITS else f"{row['share_right']:.0%}",
            f"{row['tokens_a_round']:.2f}",
            ratio(row["speedup"]),
        ]
        for row in result["rows"]
    ]
    return [
        Grid(
            title=f"A draft model ({draft}) ahead of its target ({target}, {result['shape']} shape), random weights, "
            f"{result['weights']}, context {result['prompt_length']}, {result['environment']['threads']} threads: "
            "milliseconds a round",
            columns=[
                "a level\nis right",
                "depth",
                "drafts",
                "round",
                "target",
                "waits for\nthe drafter",
                "rest",
                "guesses\nright",
                "tokens\na round",
                "x waiting",
            ],
            rows=rows,
            words={"drafts"},
            caption="Acceptance is set. Simulated: each model as fast as alone, the guesses right as often as found.",
        )
    ]


def bench_ahead(
    shape: Shape = "0.5B",
    rates: Annotated[
        list[float] | None, typer.Option("--rate", help="A level is right so often (repeatable; default: 0.6, 0.8).")
    ] = None,
    depths: Annotated[
        list[int] | None, typer.Option("--depth", min=1, help="Tokens of a draft (repeatable; default: 2, 5).")
    ] = None,
    kind: Annotated[str | None, typer.Option("--type", help="Packed weights: Q4_0, Q8_0 ... (default: dense).")] = None,
    dtype: Dtype = "bfloat16",
    context: Context = 256,
    rounds: Rounds = 24,
    repeats: Repeats = 3,
    threads: Threads = None,
    json_only: JsonOnly = False,
    markdown: Markdown = False,
    out: Out = None,
) -> None:
    """What drafting ahead brings a draft model at real shapes, with random weights and set acceptance, on the CPU."""
    prepare(threads)
    result = measure_ahead(
        shape,
        rates=rates or (0.6, 0.8),
        depths=depths or (2, 5),
        kind=kind,
        dtype=dtype,
        prompt_length=context,
        rounds=rounds,
        repeats=repeats,
    )
    report(result, tables(result), json_only=json_only, markdown=markdown, out=out)
