"""The headline: one GGUF file, with the same prompts and tokens for transformers, llama.cpp and this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer

from hf_speculate.errors import SpeculateError
from hf_speculate_gguf.named import NAMED_TARGETS, QWEN_CODER, SMOLLM2
from hf_speculate_tools.bench.identity import compare_texts
from hf_speculate_tools.bench.methods import Method, eager_method, speculator_methods
from hf_speculate_tools.bench.runs import Request, batches, fixed_length, measure_in_turn, num_steps
from hf_speculate_tools.bench.summary import summarize
from hf_speculate_tools.bench.workload import WorkloadSettings, load_workload
from hf_speculate_tools.commands import (
    Grid,
    Limit,
    NewTokens,
    PromptFiles,
    Repeats,
    Temperatures,
    check_temperatures,
    load_target,
    parse_specs,
    progress,
    say,
    target_path,
)

from .command import run
from .engines import LLAMA_CPP, LlamaCppPython, engine_methods
from .headline_picture import draw


ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / ".venv-llama"  # made by `make llama-cpp`

STOCK, PLAIN = "transformers, weights dequantised to bf16", "packed weights, no drafts"
MAX_PROOFS = 8  # divergences of a method that are proven to be ties


@dataclass(kw_only=True)
class HeadlineSettings:
    """Options. Methods take turns, prompt by prompt, and all write the same number of tokens."""

    QUICK: ClassVar = {"limit": 2, "max_new_tokens": 32}

    target: Annotated[
        str | None,
        typer.Option(help=f"GGUF file: {', '.join(NAMED_TARGETS)} (default: the first one on this machine)."),
    ] = None
    prompts: PromptFiles = None
    limit: Limit = 10
    max_new_tokens: NewTokens = 96
    temperatures: Temperatures = field(default_factory=lambda: [0.0, 1.0])
    repeats: Repeats = 1
    llama_cpp: LlamaCppPython = str(LLAMA / "bin/python") if (LLAMA / ".installed").is_file() else None


def bench_headline(settings: HeadlineSettings) -> dict[str, Any]:
    """Tokens per second of transformers, llama.cpp and this package on one GGUF file.

    Returns:
        JSON-serialisable: `rows`, one for each method and temperature, as those of `bench_generate`; the texts of
        speculators are compared with those of plain `generate` on the packed weights.
    """
    check_temperatures(*settings.temperatures)
    name = settings.target or _first_target()
    if name not in NAMED_TARGETS:
        raise SpeculateError(f"target {name!r} has no bundled head; possible are {', '.join(NAMED_TARGETS)}.")
    head = ROOT / "examples" / NAMED_TARGETS[name].head
    workload = load_workload(
        WorkloadSettings(
            target=name, prompts=settings.prompts, limit=settings.limit, max_new_tokens=settings.max_new_tokens
        )
    )
    dense, _ = load_target(name, "bfloat16", torch.device("cpu"), "dense")
    specs = parse_specs(["suffix", str(head), f"{head}+suffix"])
    ours = speculator_methods(specs, workload.model)
    longest = max(len(ids) for _, ids in workload.prompts) + settings.max_new_tokens
    requests = batches(workload.prompts, 1, torch.device("cpu"))
    if settings.llama_cpp is None:
        say("llama.cpp is left out: `make llama-cpp` compiles it for this machine.", err=True)
    with engine_methods({LLAMA_CPP: settings.llama_cpp}, target_path(name), longest) as others:
        stock = [Method(name=STOCK, kind="eager", model=dense)]
        methods = [*stock, *others, eager_method(), *ours]
        rows = _rows(settings, workload.model, methods, requests)
    return {
        "bench": "headline",
        **workload.describe(),
        "head": head.name,
        "max_new_tokens": settings.max_new_tokens,
        "repeats": settings.repeats,
        "rows": rows,
    }


def _first_target() -> str:
    """Name of the larger file, if it is on this machine."""
    for target in (QWEN_CODER, SMOLLM2):
        if target.find() is not None:
            return target.name
        say(f"{target.name} is left out: it is not on this machine ({target.install}).", err=True)
    raise SpeculateError("there is no GGUF file to measure: install one of the above.")


def _rows(
    settings: HeadlineSettings, model: Any, methods: Sequence[Method], requests: Sequence[Request]
) -> list[dict[str, Any]]:
    total = len(settings.temperatures) * num_steps(len(methods), len(requests), settings.repeats)
    rows: list[dict[str, Any]] = []
    with progress("headline", total=total) as advance:
        for temperature in settings.temperatures:
            arguments = fixed_length(settings.max_new_tokens, temperature)
            runs = measure_in_turn(model, methods, requests, arguments, settings.repeats, advance)
            identical = {
                method.name: compare_texts(model, method, runs, requests, arguments, MAX_PROOFS) for method in methods
            }
            rows += summarize(1, temperature, runs, methods, identical)
    return [row | {"method": PLAIN if row["method"] == eager_method().name else row["method"]} for row in rows]


def tables(result: dict[str, Any]) -> Sequence[Grid | str]:
    """One table, a line for each method."""
    env, rows = result["environment"], result["rows"]
    methods: dict[str, dict[str, Any]] = {}
    for row in rows:
        methods.setdefault(row["method"], {"method": row["method"]})[f"T={row['temperature']:g}"] = row
    columns: dict[str, Any] = {"method": "{method}"}
    for key in dict.fromkeys(f"T={row['temperature']:g}" for row in rows):
        name = "greedy" if key == "T=0" else key
        columns[f"{name},\ntokens/s"] = f"{{{key}[tokens_per_second][median]:.1f}}"
        columns[f"{name},\nx transformers"] = f"{{{key}[speedup][{STOCK}]:.2f}}x"
        columns[f"{name},\nsame text"] = f"{{{key}[identical][share]:.0%}}"
    title = (
        f"{result['target']}, {env['device']}, {env['threads']} threads: {result['num_prompts']} prompts of "
        f"{', '.join(Path(name).stem for name in result['prompt_sets'])}, {result['max_new_tokens']} new tokens each"
    )
    caption = (
        "Same text: share of the texts that equal plain generate's on the packed weights, token for token. "
        "transformers and llama.cpp compute with other roundings, so theirs are not compared."
    )
    return [Grid.of(title, list(methods.values()), columns, caption=caption)]


if __name__ == "__main__":
    run(HeadlineSettings, bench_headline, tables, draw)
