"""Options of command lines, each declared once: annotations of a command's parameters or of a settings class."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ..errors import SpeculateError
from ..models import NAMED_TARGETS


# Target, speculators, prompts and request.
TargetOption = Annotated[
    str | None,
    typer.Option(help=f"Model: path, Hub id, GGUF file, {', '.join(NAMED_TARGETS)} (default: examples/pycoder)."),
]
Specs = Annotated[
    list[str] | None, typer.Option("--speculator", "-s", help="Drafter: NAME_OR_PATH:option=value,... (repeatable).")
]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts", help="Read prompts from JSON lines: prompt, text, question, turns or messages (repeatable)."
    ),
]
Category = Annotated[
    list[str] | None, typer.Option("--category", help="Take only prompts of this category (repeatable).")
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help="Take this many prompts of each file, spread over its categories (default: all)."),
]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")]
TargetDtype = Annotated[
    str, typer.Option(help="Dtype of the model: auto (the checkpoint's), float32, bfloat16, float16.")
]
Exact = Annotated[bool, typer.Option("--exact", help="Write plain's very text in 16 bit too, or refuse and say why.")]
GgufBackend = Annotated[str, typer.Option(help="Backend of a GGUF file: auto, native-int8, dense ...")]
Device = Annotated[str | None, typer.Option(help="Device of the model (default: the accelerator if there is one).")]
Layers = Annotated[int | None, typer.Option(min=1, help="Run fewer layers than the shape has, where it does not fit.")]
Rates = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        help="Set the share of rounds accepted to depth 1, 2, ...: 0.8,0.6,0.4",
    ),
]
BatchSizes = Annotated[list[int], typer.Option("--batch-size", min=1, help="Rows of a batch (repeatable).")]
Temperatures = Annotated[
    list[float], typer.Option("--temperature", min=0, help="Sample at this temperature; 0 is greedy (repeatable).")
]
NewTokens = Annotated[int, typer.Option(min=1, help="New tokens of every row.")]
Repeats = Annotated[int, typer.Option(min=1, help="Passes over the prompts; figures are medians over them.")]

# Run and output.
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of torch (default: torch's own).")]
Quick = Annotated[bool, typer.Option("--quick", help="Measure less: fewer prompts, tokens and repeats.")]
JsonOnly = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")]
Out = Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")]


def _needs_matplotlib(folder: Path | None) -> Path | None:
    """Raises early if matplotlib is missing: before the measurement, not after it."""
    if folder is not None and find_spec("matplotlib") is None:
        raise SpeculateError("--plot needs matplotlib: pip install 'hf-speculate[plots]'.")
    return folder


Plot = Annotated[
    Path | None, typer.Option(help="Draw PNGs into this folder (needs matplotlib).", callback=_needs_matplotlib)
]
