"""The commands `hf-speculate train` and `hf-speculate train-bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from transformers.utils import logging

from hf_speculate.bench.reporting import console, save_line

from ..bench.losses import LossShape
from ..bench.steps import TrainBenchSettings, bench_train, tables
from .dry_run import describe_run
from .recipe import read_recipe
from .run import prepare, train_head


TRAIN_EXAMPLES = """
Examples:

  hf-speculate train --config training/recipes/pycoder-eagle3.yaml

  hf-speculate train --config recipe.yaml --set training.learning_rate=3e-4 --set output.folder=runs/b --dry-run

  hf-speculate train --config recipe.yaml --resume

  accelerate launch -m hf_speculate_training train --config recipe.yaml
"""


def train(
    config: Annotated[Path, typer.Option("--config", "-c", help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, wins over the recipe (repeatable).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Load everything, print sizes, steps and the first batch; write nothing.")
    ] = False,
) -> None:
    """Train a head for a target, by a recipe."""
    recipe = read_recipe(config, overrides or ())
    if dry_run:
        console().print(describe_run(prepare(recipe, write=False)))
        return
    folder = train_head(recipe, resume=resume)
    typer.echo(f"{folder} holds the head: AutoSpeculator.from_pretrained({str(folder)!r}, target=model)")


def train_bench(
    target: Annotated[str | None, typer.Option(help="Path or Hub id (default: examples/pycoder).")] = None,
    method: Annotated[list[str] | None, typer.Option("--method", "-m", help="Repeatable (default: all).")] = None,
    dtype: Annotated[str, typer.Option(help="Of the target: auto, float32, bfloat16, float16.")] = "auto",
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 4,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a row.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Steps; figures are medians over them.")] = 5,
    bf16: Annotated[bool, typer.Option("--bf16", help="Autocast.")] = False,
    vocab: Annotated[int, typer.Option(min=0, help="Columns of the losses that are compared; 0: none.")] = 131072,
    entries: Annotated[int, typer.Option(min=1, help="Predictions in those losses.")] = 1024,
    speculators_python: Annotated[
        str | None, typer.Option(help="Interpreter with the `speculators` package: its loss beside ours, on the CPU.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch.")] = None,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator if there is one.")] = None,
    json_only: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here too.")] = None,
) -> None:
    """Measure training: tokens/s and memory of the methods, and the lean loss beside the plain one."""
    logging.disable_progress_bar()  # of transformers: "Loading weights"
    settings = TrainBenchSettings(
        target=target,
        dtype=dtype,
        methods=method or TrainBenchSettings.methods,
        rows=rows,
        length=length,
        repeats=repeats,
        bf16=bf16,
        loss=LossShape(num_entries=entries, vocab_size=vocab) if vocab else None,
        speculators_python=speculators_python,
        threads=threads,
        device=device,
    )
    result = bench_train(settings)
    line = json.dumps(result)
    save_line(line, out)
    if not json_only:
        for table in tables(result):
            console().print(table)
    typer.echo(line)
