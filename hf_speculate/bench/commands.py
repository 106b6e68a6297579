"""The sub-commands of `hf-speculate bench` that run on real text, and `all`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..commands.reporting import (
    Category,
    Device,
    JsonOnly,
    Layers,
    Limit,
    Markdown,
    Out,
    PromptFiles,
    Quick,
    Rates,
    Raw,
    Repeats,
    Specs,
    Target,
    TargetDtype,
    Temperatures,
    Threads,
    prepare,
    report,
)
from ..commands.shapes import SHAPES
from . import acceptance, batch, generate_tables, loss
from .acceptance import AcceptanceSettings, bench_acceptance
from .batch import BATCH_SIZES, bench_batch
from .everything import bench_all_command
from .generate import GenerateSettings, bench_generate
from .loss import BAD_DRAFTERS, LossSettings, bench_loss
from .plots import require_matplotlib, write_plots
from .profiles import DEFAULT_RATES, read_profile
from .shape_commands import add_shape_commands


_GENERATE_EXAMPLES = """
Every method emits exactly --max-new-tokens tokens (EOS is taken out of the requests), prompt by prompt in turn.
Definitions of the figures: `python -m pydoc hf_speculate.bench`.

Examples:

  hf-speculate bench generate --quick

  hf-speculate bench generate --target ./model -s prompt_lookup -s ./head

  hf-speculate bench generate -s draft_model:model=./draft,depth=4,top_k=2

  hf-speculate bench generate --prompts spec_bench.jsonl --category math_reasoning --category rag --limit 60

  hf-speculate bench generate --shape 8B --acceptance 0.8,0.6,0.45,0.3 --compile-baseline
"""

_ACCEPTANCE_EXAMPLES = """
Examples:

  hf-speculate bench acceptance -s ./head:depth=6,top_k=6 -s draft_model:model=./draft,top_k=4

  hf-speculate bench acceptance --prompts files.jsonl --prompt-tokens 64 --first-token 200 --nodes 16
"""

_LOSS_EXAMPLES = """
Examples:

  hf-speculate bench loss --threads 2

  hf-speculate bench loss --target ./model --drafter random --always

  hf-speculate bench loss -s draft_model:model=./another-tongue
"""


app = typer.Typer(
    help="Measure, beside stock transformers in the same run. The last line of stdout is one line of JSON.",
    epilog=_GENERATE_EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.command("generate", epilog=_GENERATE_EXAMPLES)
def bench_generate_command(
    target: Target = None,
    speculator: Specs = None,
    prompts: PromptFiles = None,
    category: Category = None,
    limit: Limit = None,
    raw: Raw = False,
    dtype: TargetDtype = "auto",
    shape: Annotated[
        str | None,
        typer.Option(help=f"Random weights and a synthetic drafter instead of a target: {', '.join(SHAPES)}."),
    ] = None,
    layers: Layers = None,
    acceptance: Rates = None,
    nodes: Annotated[int, typer.Option(min=1, help="Of the synthetic drafter's trees.")] = 16,
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable (default: 1).")] = None,
    temperature: Temperatures = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of every row (default: 128).")] = None,
    compile_baseline: Annotated[
        bool | None,
        typer.Option(
            "--compile-baseline/--no-compile-baseline",
            help="Stock with static cache and torch.compile too (default: on accelerators).",
        ),
    ] = None,
    lookup_tokens: Annotated[int, typer.Option(min=1, help="prompt_lookup_num_tokens of stock.")] = 10,
    repeats: Repeats = None,
    threads: Threads = None,
    device: Device = None,
    quick: Quick = False,
    json_only: JsonOnly = False,
    markdown: Markdown = False,
    plot: Annotated[Path | None, typer.Option(help="Draw PNGs into this folder (needs matplotlib).")] = None,
    out: Out = None,
) -> None:
    """Tokens per second of speculators beside stock eager, compiled, prompt lookup and assisted generation."""
    prepare(threads)
    if plot is not None:
        require_matplotlib()  # before the long part
    settings = GenerateSettings(
        target=target,
        speculators=speculator,
        prompts=prompts or (),
        categories=category,
        limit=limit or (2 if quick else None),
        raw=raw,
        dtype=dtype,
        batch_sizes=batch_size or (1,),
        temperatures=temperature or ((0.0, 1.0) if shape is None else (0.0,)),
        max_new_tokens=max_new_tokens or (48 if quick else 128),
        shape=shape,
        layers=layers,
        profile=None if shape is None else read_profile(acceptance or DEFAULT_RATES, nodes),
        compile_baseline=compile_baseline,
        prompt_lookup_num_tokens=lookup_tokens,
        repeats=repeats or (2 if quick else 3),
        round_costs=plot is not None,
        device=device,
    )
    result = bench_generate(settings)
    written = [] if plot is None else write_plots(result, plot)
    parts = [*generate_tables.tables(result), *(f"wrote {path}" for path in written)]
    report(result, parts, json_only=json_only, markdown=markdown, out=out)


@app.command("batch")
def bench_batch_command(
    target: Target = None,
    speculator: Specs = None,
    prompts: PromptFiles = None,
    category: Category = None,
    limit: Limit = None,
    raw: Raw = False,
    dtype: TargetDtype = "auto",
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable (default: 1, 2, 4, 8).")] = None,
    temperature: Temperatures = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of every row (default: 64).")] = None,
    repeats: Repeats = None,
    threads: Threads = None,
    device: Device = None,
    json_only: JsonOnly = False,
    markdown: Markdown = False,
    out: Out = None,
) -> None:
    """Throughput at batch 1, 2, 4, 8 beside plain generate, with the automatic switch on and off."""
    prepare(threads)
    settings = GenerateSettings(
        target=target,
        speculators=speculator,
        prompts=prompts or (),
        categories=category,
        limit=limit or 8,
        raw=raw,
        dtype=dtype,
        batch_sizes=batch_size or BATCH_SIZES,
        temperatures=temperature or (0.0,),
        max_new_tokens=max_new_tokens or 64,
        compile_baseline=False,
        repeats=repeats or 3,
        device=device,
    )
    result = bench_batch(settings)
    report(result, batch.tables(result), json_only=json_only, markdown=markdown, out=out)


@app.command("acceptance", epilog=_ACCEPTANCE_EXAMPLES)
def bench_acceptance_command(
    target: Target = None,
    speculator: Specs = None,
    prompts: PromptFiles = None,
    category: Category = None,
    limit: Limit = None,
    raw: Raw = False,
    dtype: TargetDtype = "auto",
    nodes: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Draft nodes of the fixed trees, the root not counted (default: 8, 16, 32)."),
    ] = None,
    temperature: Temperatures = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Take so many tokens of each text, without chat template.")
    ] = None,
    first_token: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of every prompt.")] = 96,
    threads: Threads = None,
    device: Device = None,
    json_only: JsonOnly = False,
    markdown: Markdown = False,
    out: Out = None,
) -> None:
    """Mean acceptance length and acceptance by depth of fixed trees, several speculators side by side. No clock."""
    prepare(threads)
    settings = AcceptanceSettings(
        target=target,
        speculators=speculator,
        prompts=prompts or (),
        categories=category,
        limit=limit,
        raw=raw,
        dtype=dtype,
        nodes=nodes or (8, 16, 32),
        temperatures=temperature or (0.0, 1.0),
        prompt_tokens=prompt_tokens,
        first_token=first_token,
        max_new_tokens=max_new_tokens,
        device=device,
    )
    result = bench_acceptance(settings)
    report(result, acceptance.tables(result), json_only=json_only, markdown=markdown, out=out)


@app.command("loss", epilog=_LOSS_EXAMPLES)
def bench_loss_command(
    target: Target = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help=f"Repeatable (default: all). {'; '.join(f'{k}: {v}' for k, v in BAD_DRAFTERS.items())}."),
    ] = None,
    speculator: Specs = None,
    prompts: PromptFiles = None,
    category: Category = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 1,
    raw: Raw = False,
    dtype: TargetDtype = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of every prompt.")] = 256,
    always: Annotated[bool, typer.Option("--always", help="Without the automatic switch.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Every call begins without what earlier ones taught the switch.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved passes; figures are medians over them.")] = 7,
    threads: Threads = None,
    device: Device = None,
    json_only: JsonOnly = False,
    markdown: Markdown = False,
    out: Out = None,
) -> None:
    """What speculation costs on text that drafts badly: drafters that are never right beside plain generate."""
    prepare(threads)
    settings = LossSettings(
        target=target,
        speculators=speculator,
        drafters=drafter or tuple(BAD_DRAFTERS),
        prompts=prompts or (),
        categories=category,
        limit=limit,
        raw=raw,
        dtype=dtype,
        max_new_tokens=max_new_tokens,
        adaptive=not always,
        fresh=fresh,
        repeats=repeats,
        device=device,
    )
    result = bench_loss(settings)
    report(result, loss.tables(result), json_only=json_only, markdown=markdown, out=out)


add_shape_commands(app)
app.command("all")(bench_all_command)
