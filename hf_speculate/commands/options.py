"""Options of command lines, each declared once: annotations of a command's parameters or of a settings class."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ..errors import SpeculateError
from .shapes import SHAPES


# What is measured.
Target = Annotated[str | None, typer.Option(help="Path or Hub id, GGUF file, or smollm2 (default: examples/pycoder).")]
Specs = Annotated[
    list[str] | None, typer.Option("--speculator", "-s", help="NAME_OR_PATH:option=value,... (repeatable).")
]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts", help="JSON lines with prompt, text, question, turns (Spec-Bench) or messages (repeatable)."
    ),
]
Category = Annotated[list[str] | None, typer.Option("--category", help="Only prompts of this category (repeatable).")]
Limit = Annotated[int | None, typer.Option(min=1, help="Prompts of each file, spread over its categories.")]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")]
TargetDtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16.")]
Exact = Annotated[bool, typer.Option("--exact", help="In 16 bit, too, plain's very text; or a refusal that says why.")]
GgufBackend = Annotated[str, typer.Option(help="Of a GGUF file: auto, native-int8, dense ...")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16.")]
Device = Annotated[str | None, typer.Option(help="Default: the accelerator if there is one.")]
Shape = Annotated[str, typer.Option(help=f"Random weights, one of {', '.join(SHAPES)}.")]
Layers = Annotated[int | None, typer.Option(min=1, help="Fewer layers than the shape has, where it does not fit.")]
Rates = Annotated[
    str | None,
    typer.Option(
        "--acceptance",
        help="Share of the rounds accepted to depth 1, 2, ...: 0.8,0.6,0.4",
    ),
]
BatchSizes = Annotated[list[int], typer.Option("--batch-size", min=1, help="Repeatable.")]
Temperatures = Annotated[list[float], typer.Option("--temperature", min=0, help="Repeatable; 0 is greedy.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Of every row.")]
Context = Annotated[int, typer.Option(min=1, help="Prompt length.")]
Rounds = Annotated[int, typer.Option(min=2, help="About as many are timed.")]
Repeats = Annotated[int, typer.Option(min=1, help="Interleaved passes; figures are medians over them.")]

# How it is run and shown.
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of torch (default: torch's own).")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer prompts, tokens and repeats.")]
JsonOnly = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")]
Out = Annotated[Path | None, typer.Option(help="Write the JSON here too.")]


def _needs_matplotlib(folder: Path | None) -> Path | None:
    """Said before the long part."""
    if folder is not None and find_spec("matplotlib") is None:
        raise SpeculateError("--plot needs matplotlib: pip install 'hf-speculate[plots]'.")
    return folder


Plot = Annotated[
    Path | None, typer.Option(help="Draw PNGs into this folder (needs matplotlib).", callback=_needs_matplotlib)
]
