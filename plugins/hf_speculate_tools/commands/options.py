"""Options of command lines, each declared once: annotations of a command's parameters or of a settings class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_speculate_gguf.named import NAMED_TARGETS

from .checks import check_dtype, check_plots, check_temperatures, checked
from .prompts import check_prompts
from .targets import check_target, default_target, parse_spec, parse_specs


MODEL_FORMS = f"folder, Hub id, GGUF file, or {', '.join(NAMED_TARGETS)}"


def target_option(about: str, default: Callable[[], str] | None = None, *, is_checked: bool = True) -> Any:
    """The option `--target`, `-t`, checked before anything is loaded.

    Args:
        about: help text.
        default: function that returns the target if the user names none; it raises where that one is absent.
        is_checked: False leaves the check to the command, in which another option may override this one.
    """

    def callback(value: str | None) -> str | None:
        name = default() if value is None and default is not None else value
        if name is not None:
            check_target(name)
        return value

    return typer.Option("--target", "-t", help=about, callback=callback if is_checked else None)


def speculator_option(about: str, *also: str) -> Any:
    """The option `--speculator`, `-s` for one drafter; `also` are further words that it takes."""
    return typer.Option("--speculator", "-s", help=about, callback=checked(parse_spec, *also))


def speculators_option(about: str) -> Any:
    """The option `--speculator`, `-s` for several drafters."""

    def callback(values: list[str] | None) -> list[str] | None:
        parse_specs(values or ())
        return values

    return typer.Option("--speculator", "-s", help=about, callback=callback)


def temperature_option(about: str, at_least: float | None = None) -> Any:
    """The option `--temperature`, for one value or several."""
    return typer.Option("--temperature", min=at_least, help=about, callback=checked(check_temperatures))


def new_tokens_option(about: str, at_least: int = 1) -> Any:
    """The option `--max-new-tokens`, `-n`."""
    return typer.Option("--max-new-tokens", "-n", min=at_least, help=about)


# Target, speculators, prompts and request.
TargetOption = Annotated[
    str | None, target_option(f"Model: {MODEL_FORMS} (default: examples/pycoder).", default_target)
]
Specs = Annotated[
    list[str] | None,
    speculators_option(
        "Drafter: a name or a head's folder, as NAME:option=value,... (repeatable; default: those that fit)."
    ),
]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts",
        help="JSON-lines file with prompts in prompt, text, question, turns or messages "
        "(repeatable; default: built-in prompts).",
        callback=checked(check_prompts),
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
    str,
    typer.Option(
        help="Dtype of the model: auto (the checkpoint's), float32, bfloat16, float16 or float64.",
        callback=checked(check_dtype, "auto"),
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact", help="In 16 bit too, guarantee the text of plain generation, or fail with the reason. Slower."
    ),
]
GgufBackend = Annotated[
    str, typer.Option(help="Backend of a GGUF file: auto, native, native-int8, dequantize, triton or dense.")
]
Device = Annotated[str | None, typer.Option(help="Device of the model (default: the accelerator, else the CPU).")]
BatchSizes = Annotated[
    list[int], typer.Option("--batch-size", min=1, help="Number of prompts in a batch (repeatable).")
]
Temperatures = Annotated[list[float], temperature_option("Sample at this temperature; 0 is greedy (repeatable).", 0)]
NewTokens = Annotated[int, new_tokens_option("Generate this many tokens for every prompt.")]
Repeats = Annotated[int, typer.Option(min=1, help="Go over the prompts this many times; figures are medians.")]

# Run and output.
Threads = Annotated[int | None, typer.Option(min=1, help="Number of CPU threads (default: torch's choice).")]
Quick = Annotated[bool, typer.Option("--quick", help="Measure less: fewer prompts, tokens and repeats.")]
JsonOnly = Annotated[bool, typer.Option("--json", help="Print only JSON, without tables.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")]
Out = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")]
Plot = Annotated[
    Path | None,
    typer.Option(
        help="Draw the figures as PNG files into this folder (needs matplotlib).", callback=checked(check_plots)
    ),
]
