"""The command `hf-speculate tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..bench.methods import default_target
from ..bench.reporting import console, prepare
from ..tuning_file import TUNING_FILE
from . import report
from .running import TuneSettings, as_json
from .running import tune as run


_WRITE = f"Write the result here: a head's folder (as {TUNING_FILE}, which from_pretrained reads) or a file (tuning=)."


def tune(
    speculator: Annotated[str, typer.Option("--speculator", "-s", help="NAME_OR_PATH:option=value,...")],
    target: Annotated[str | None, typer.Option(help="Path or Hub id (default: examples/pycoder).")] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="JSON lines with prompt, text, question, turns or messages (repeatable)."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each file.")] = None,
    write: Annotated[Path | None, typer.Option(help=_WRITE)] = None,
    verify: Annotated[bool, typer.Option(help="Measure the choice against plain generate.")] = True,
    verify_prompts: Annotated[
        list[Path] | None, typer.Option(help="Other prompts for that (repeatable; default: the same).")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Cache entries to measure at (repeatable; default: 128, 512, 2048).")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=16, help="Of every call.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Of the verification.")] = 3,
    reuse_costs: Annotated[bool, typer.Option("--reuse-costs", help="Take the target's costs from the cache.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: the accelerator if there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch (default: torch's own).")] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Measure costs and acceptance, choose the tree that pays best, predict the speed-up and verify it.

    The last line of stdout is one line of JSON.
    """
    prepare(threads)
    settings = TuneSettings(
        target=target or default_target(),
        speculator=speculator,
        prompts=prompts or (),
        limit=limit,
        raw=raw,
        verify=verify,
        verify_prompts=verify_prompts or (),
        dtype=dtype,
        device=device,
        batch_size=batch_size,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        contexts=context,
        repeats=repeats,
        reuse_costs=reuse_costs,
    )
    outcome = run(settings)
    result = as_json(settings, outcome)
    if write is not None:
        result["written"] = str(outcome.tuning.save(write))
    if not json_only:
        for table in report.tables(outcome):
            console().print(table)
        typer.echo(report.verdict(outcome.best))
        if write is not None:
            typer.echo(f"Written: {result['written']}")
    typer.echo(json.dumps(result))
