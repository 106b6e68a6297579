"""Command line of the maintainers' benchmarks: `python -m tests.benchmarks.NAME`, or `make bench-NAME`.

Each benchmark is a dataclass of options, a function that measures, and one that draws tables. The last line of stdout
is one line of JSON, as for `hf-speculate bench`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedTokenizerBase

from hf_speculate.errors import SpeculateError
from hf_speculate.target import GenerativeModel
from hf_speculate_tools.bench.runs import TimedRun, seconds_by_repeat
from hf_speculate_tools.commands import (
    Device,
    Grid,
    TargetOption,
    add_command,
    by_depth,
    default_target,
    find_device,
    load_target,
    spread,
)

from ..support.random_gguf import FileShape, find_recipe, write_random_file


Context = Annotated[int, typer.Option(min=1, help="Prompt length in tokens.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16.")]
Rounds = Annotated[int, typer.Option(min=2, help="Rounds to time, about.")]

# Columns for rows with the figures of `bench acceptance`.
ACCEPTANCE_COLUMNS: dict[str, Any] = {
    "tokens\na round": "{tokens_per_round:.2f}",
    "±": "{standard_error:.2f}",
    "by depth": lambda row: by_depth(row["acceptance_rate_by_depth"]),
}


@dataclass(kw_only=True)
class TargetSettings:
    """Options of benchmarks on a target, by default the bundled one."""

    target: TargetOption = None
    device: Device = None

    def load(self) -> tuple[str, GenerativeModel, PreTrainedTokenizerBase]:
        """Name, model and tokenizer of the target."""
        name = self.target or default_target()
        return name, *load_target(name, "auto", find_device(self.device))


def against_plain(runs: Sequence[TimedRun], method: str) -> dict[str, Any]:
    """Tokens per second and speed-up over eager, spread over the repeats."""
    plain, ours = seconds_by_repeat(runs, "eager"), seconds_by_repeat(runs, method)
    tokens = sum(run.num_tokens for run in runs if run.method == method and run.repeat == 0)
    return {
        "tokens_per_second": spread([tokens / seconds for seconds in ours]),
        "speedup": spread([p / s for p, s in zip(plain, ours, strict=True)]),
    }


def run(
    settings: type[Any],
    measure: Callable[[Any], dict[str, Any]],
    tables: Callable[[dict[str, Any]], Sequence[Grid | str]],
    draw: Callable[[dict[str, Any], Path], Sequence[Path]] | None = None,
) -> None:
    """Runs a benchmark from the command line; an error is one line. `draw` makes pictures for `--plot`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    add_command(app, measure.__name__, settings, measure, tables, draw=draw)
    try:
        app()
    except SpeculateError as error:
        raise SystemExit(f"error: {error}") from error


@contextmanager
def random_file(shape: FileShape, kind: str, metadata: dict[str, Any] | None = None) -> Iterator[str]:
    """Path of a GGUF file with random weights of a type, for the time of a measurement."""
    recipe = find_recipe(kind, shape)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "random.gguf"))
        write_random_file(path, shape, recipe, metadata=metadata)
        yield path
