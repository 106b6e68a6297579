"""Options of command lines, each declared once: annotations of a command's parameters or of a settings class."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from hf_speculate.errors import SpeculateError
from hf_speculate_gguf.named import NAMED_TARGETS


# Target, speculators, prompts and request.
TargetOption = Annotated[
    str | None,
    typer.Option(help=f"Model: folder, Hub id, GGUF file, or {', '.join(NAMED_TARGETS)} (default: examples/pycoder)."),
]
Specs = Annotated[
    list[str] | None,
    typer.Option(
        "--speculator",
        "-s",
        help="Drafter: a name or a head's folder, as NAME:option=value,... (repeatable; default: those that fit).",
    ),
]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts",
        help="JSON-lines file with prompts in prompt, text, question, turns or messages "
        "(repeatable; default: built-in prompts).",
    ),
]
Category = Annotated[
    list[str] | None, typer.Option("--category", help="Use only prompts of this category (repeatable; default: all).")
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help="Use this many prompts of each file, spread over its categories (default: all)."),
]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.")]
TargetDtype = Annotated[
    str, typer.Option(help="Dtype of the model: auto (the checkpoint's), float32, bfloat16, float16 or float64.")
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact", help="In 16 bit too, guarantee the text of plain generation, or fail with the reason. Slower."
    ),
]
GgufBackend = Annotated[
    str, typer.Option(help="Backend of a GGUF file: auto, native, native-int8, dequantize or dense.")
]
Device = Annotated[str | None, typer.Option(help="Device of the model (default: the accelerator, else the CPU).")]
BatchSizes = Annotated[
    list[int], typer.Option("--batch-size", min=1, help="Number of prompts in a batch (repeatable).")
]
Temperatures = Annotated[
    list[float], typer.Option("--temperature", min=0, help="Sample at this temperature; 0 is greedy (repeatable).")
]
NewTokens = Annotated[int, typer.Option(min=1, help="Generate this many tokens for every prompt.")]
Repeats = Annotated[int, typer.Option(min=1, help="Go over the prompts this many times; figures are medians.")]

# Run and output.
Threads = Annotated[int | None, typer.Option(min=1, help="Number of CPU threads (default: torch's choice).")]
Quick = Annotated[bool, typer.Option("--quick", help="Measure less: fewer prompts, tokens and repeats.")]
JsonOnly = Annotated[bool, typer.Option("--json", help="Print only JSON, without tables.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")]
Out = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")]


def _needs_matplotlib(folder: Path | None) -> Path | None:
    """Raises early if matplotlib is missing: before the measurement, not after it."""
    if folder is not None and find_spec("matplotlib") is None:
        raise SpeculateError("--plot needs matplotlib: pip install 'hf-speculate[plots]'.")
    return folder


Plot = Annotated[
    Path | None,
    typer.Option(help="Draw the figures as PNG files into this folder (needs matplotlib).", callback=_needs_matplotlib),
]
