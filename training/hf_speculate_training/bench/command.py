"""`hf-speculate train-bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from transformers.utils import logging

from hf_speculate.commands import console, save_line, say_json

from ..target import DtypeName
from .losses import LossShape
from .steps import TrainBenchSettings, bench_train, tables


def train_bench(
    target: Annotated[str | None, typer.Option(help="Path or Hub id (default: examples/pycoder).")] = None,
    method: Annotated[list[str] | None, typer.Option("--method", "-m", help="Repeatable (default: all).")] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Of the target.")] = "auto",
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
        methods=method or None,
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
    save_line(json.dumps(result), out)
    if not json_only:
        for table in tables(result):
            console().print(table)
    say_json(result)
