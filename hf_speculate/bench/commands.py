"""The sub-commands of `hf-speculate bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, RenderableType
from transformers.utils import logging

from ..errors import SpeculateError
from . import cache, overhead, summary
from .cache import bench_cache
from .generate import GenerateSettings, bench_generate
from .methods import default_target
from .overhead import ModelShape, bench_overhead


_GENERATE_EXAMPLES = """
Every method emits exactly --max-new-tokens tokens (EOS is taken out of the requests), prompt by prompt in turn.
Definitions of the figures: `python -m pydoc hf_speculate.bench`.

Examples:

  hf-speculate bench generate --quick

  hf-speculate bench generate --target ./model -s prompt_lookup -s ./head

  hf-speculate bench generate -s draft_model:model=./draft,depth=4,top_k=2

  hf-speculate bench generate --prompts spec_bench.jsonl --limit 60
"""

_OVERHEAD_EXAMPLES = """
Examples:

  hf-speculate bench overhead --threads 2

  hf-speculate bench overhead --nodes 8 --nodes 64 --accuracy 0.8 --dtype float32

  hf-speculate bench overhead --layers 2 --vocab 4000
"""

_CACHE_EXAMPLES = """
Examples:

  hf-speculate bench cache

  hf-speculate bench cache --lengths 256 --lengths 32768 --json
"""


app = typer.Typer(
    help="Measure, beside stock transformers in the same run. The last line of stdout is one line of JSON.",
    epilog=_GENERATE_EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
)

JsonOnly = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Out = Annotated[Path | None, typer.Option(help="Write the JSON here too.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer prompts, tokens and repeats: under a minute.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of torch (default: torch's own).")]
Device = Annotated[str | None, typer.Option(help="Default: the accelerator if there is one.")]
Repeats = Annotated[int | None, typer.Option(min=1, help="Repeats; figures are medians over them.")]


@app.command("generate", epilog=_GENERATE_EXAMPLES)
def bench_generate_command(
    target: Annotated[str | None, typer.Option(help="Path or Hub id (default: examples/pycoder).")] = None,
    speculator: Annotated[
        list[str] | None,
        typer.Option("--speculator", "-s", help="NAME_OR_PATH:option=value,... (repeatable)."),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSON lines with prompt, text, question, turns or messages (repeatable)."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each file, spread over its categories.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")] = "auto",
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable (default: 1).")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="Repeatable; 0 is greedy (default: 0 and 1).")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of every row (default: 128).")] = None,
    lookup_tokens: Annotated[int, typer.Option(min=1, help="prompt_lookup_num_tokens of stock.")] = 10,
    repeats: Repeats = None,
    threads: Threads = None,
    device: Device = None,
    quick: Quick = False,
    json_only: JsonOnly = False,
    out: Out = None,
) -> None:
    """Tokens per second of speculators beside stock eager, prompt lookup and assisted generation."""
    _prepare(threads)
    settings = GenerateSettings(
        target=target,
        speculators=speculator,
        prompts=prompts or (),
        limit=limit or (3 if quick else None),
        raw=raw,
        dtype=dtype,
        batch_sizes=batch_size or (1,),
        temperatures=temperature or (0.0, 1.0),
        max_new_tokens=max_new_tokens or (48 if quick else 128),
        prompt_lookup_num_tokens=lookup_tokens,
        repeats=repeats or (2 if quick else 3),
        device=device,
    )
    result = bench_generate(settings)
    _report(result, [summary.table(result)], json_only, out)


@app.command("overhead", epilog=_OVERHEAD_EXAMPLES)
def bench_overhead_command(
    nodes: Annotated[list[int] | None, typer.Option(min=2, help="Tree sizes (default: 8, 16, 32).")] = None,
    accuracy: Annotated[float, typer.Option(min=0, max=1, help="Of the scripted drafter, a level.")] = 0.7,
    layers: Annotated[int, typer.Option(min=1)] = 24,
    hidden: Annotated[int, typer.Option(help="Hidden size; heads have 64 channels.", min=128)] = 896,
    vocab: Annotated[int, typer.Option(min=64)] = 151936,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "bfloat16",
    context: Annotated[int, typer.Option(min=1, help="Prompt length.")] = 256,
    max_new_tokens: Annotated[int | None, typer.Option(min=2, help="Default: 96.")] = None,
    repeats: Repeats = None,
    threads: Threads = None,
    device: Device = None,
    quick: Quick = False,
    json_only: JsonOnly = False,
    out: Out = None,
) -> None:
    """Where the time of a round goes, at Qwen2-0.5B shape with random weights and a scripted drafter."""
    _prepare(threads)
    result = bench_overhead(
        nodes or (8, 16, 32),
        shape=ModelShape.scaled(hidden_size=hidden, num_hidden_layers=layers, vocab_size=vocab),
        dtype=dtype,
        accuracy=accuracy,
        prompt_length=context,
        max_new_tokens=max_new_tokens or (32 if quick else 96),
        repeats=repeats or (1 if quick else 3),
        device=device,
    )
    _report(result, [overhead.table(result)], json_only, out)


@app.command("cache", epilog=_CACHE_EXAMPLES)
def bench_cache_command(
    lengths: Annotated[
        list[int] | None, typer.Option(min=1, help="Context lengths (default: 256, 1024, 4096, 16384).")
    ] = None,
    repeats: Repeats = None,
    threads: Threads = None,
    device: Device = None,
    quick: Quick = False,
    json_only: JsonOnly = False,
    out: Out = None,
) -> None:
    """Cost of append and keep over the context length, beside stock DynamicCache."""
    _prepare(threads)
    result = bench_cache(
        lengths or (256, 1024, 4096, 16384),
        repeats=repeats or (5 if quick else 30),
        device=device,
    )
    _report(result, [cache.table(result)], json_only, out)


@app.command("all")
def bench_all_command(
    threads: Threads = None, device: Device = None, quick: Quick = False, json_only: JsonOnly = False, out: Out = None
) -> None:
    """All three with their defaults: bundled target, Qwen2-0.5B shape."""
    _prepare(threads)
    settings = GenerateSettings(target=default_target(), device=device)  # absent: say so before the long part
    if quick:
        settings.limit, settings.max_new_tokens, settings.repeats = 3, 48, 2
    parts = {
        "cache": (cache.table, lambda: bench_cache(device=device, repeats=5 if quick else 30)),
        "overhead": (
            overhead.table,
            lambda: bench_overhead(device=device, max_new_tokens=32 if quick else 96, repeats=1 if quick else 3),
        ),
        "generate": (summary.table, lambda: bench_generate(settings)),
    }
    results = {}
    for name, (table, measure) in parts.items():
        results[name] = measure()
        if not json_only:
            console().print(table(results[name]))
    _report({"bench": "all", **results}, [], json_only, out)


def _prepare(threads: int | None) -> None:
    logging.disable_progress_bar()  # of transformers: "Loading weights"
    if threads is not None:
        torch.set_num_threads(threads)


def console() -> Console:
    """For tables on stdout; wide where that is a file or a pipe, so that no figure is cut off."""
    return Console(width=None if sys.stdout.isatty() else 160)


def _rounded(value: Any) -> Any:
    """Floats to six significant digits: the rest is noise that makes the line long."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _report(result: dict[str, Any], tables: list[RenderableType], json_only: bool, out: Path | None) -> None:
    """Tables, then the whole result as one line of JSON, the last one of stdout."""
    line = json.dumps(_rounded(result))
    if out is not None:
        try:
            out.write_text(line + "\n", encoding="utf-8")
        except OSError as error:
            typer.echo(line)
            raise SpeculateError(f"cannot write {out}: {error}") from error
    if not json_only:
        for table in tables:
            console().print(table)
    typer.echo(line)
