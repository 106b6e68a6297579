"""Options of `hf-speculate regenerate`, and their checks, which need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from hf_speculate.errors import SpeculateError
from hf_speculate_tools.commands import (
    check_prompts,
    checked,
    new_tokens_option,
    speculator_option,
    target_option,
    temperature_option,
)

from ..names import DtypeName, QuantizationName, check_source
from .connection import KEY_VARIABLE


EngineName: TypeAlias = Literal["local", "ray", "server"]


@dataclass(kw_only=True)
class RegenerateSettings:
    """Options of the command. Raises `SpeculateError` for options that exclude each other.

    Attributes:
        columns: our name of a column -> its name in the data.
    """

    target: Annotated[str, target_option("Model that writes the answers: folder or Hub id.")]
    output: Annotated[Path, typer.Option(help="JSON-lines file for the answers. Run the command again to resume.")]
    data: Annotated[
        str | None,
        typer.Option(
            help="Prompts: a json, jsonl, parquet, csv or text file, a folder, a pattern, or a Hub id.",
            callback=checked(check_source),
        ),
    ] = None
    self_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Instead of --data, let the target (a chat model) write this many prompts itself."),
    ] = None
    exclude: Annotated[
        list[Path] | None,
        typer.Option(
            help="Skip prompts that resemble those of this JSON-lines file, e.g. of a benchmark (repeatable).",
            callback=checked(check_prompts),
        ),
    ] = None
    speculator: Annotated[
        str,
        speculator_option(
            "Drafter: auto (prompt_lookup), none, or a name or head's folder as NAME:option=value,...", "auto", "none"
        ),
    ] = "auto"
    temperature: Annotated[
        float | None,
        temperature_option("Sample at this temperature; 0 is greedy (default: the model's own settings).", 0),
    ] = None
    top_p: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Sample from the likeliest tokens that have this probability together; needs --temperature.",
        ),
    ] = 1.0
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from the likeliest tokens, this many; 0 is all; needs --temperature.")
    ] = 0
    max_new_tokens: Annotated[int, new_tokens_option("Stop an answer after this many tokens.")] = 512
    batch_size: Annotated[int, typer.Option(min=1, help="Answer this many prompts at once.")] = 16
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0
    limit: Annotated[
        int | None, typer.Option(min=1, help="Answer only this many records, the first ones (default: all).")
    ] = None
    column: Annotated[
        list[str] | None,
        typer.Option(help="Rename a column of the data: OURS=THEIRS, e.g. prompt=question (repeatable)."),
    ] = None
    chat: Annotated[bool, typer.Option("--chat", help="Wrap prompts that are plain text as a user's chat message.")] = (
        False
    )
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Keep this many tokens of a plain text; the target continues it.")
    ] = 64
    pieces: Annotated[
        bool, typer.Option("--pieces", help="Cut plain texts into pieces; the target continues the start of each.")
    ] = False
    split: Annotated[str, typer.Option(help="Split of a Hub dataset.")] = "train"
    config: Annotated[str | None, typer.Option(help="Configuration of a Hub dataset (default: the dataset's own).")] = (
        None
    )
    revision: Annotated[str | None, typer.Option(help="Revision of the target on the Hub (default: the newest).")] = (
        None
    )
    adapter: Annotated[str | None, typer.Option(help="Load this PEFT adapter into the target (default: none).")] = None
    dtype: Annotated[DtypeName, typer.Option(help="Dtype of the target; auto is the checkpoint's.")] = "auto"
    quantization: Annotated[
        QuantizationName | None, typer.Option(help="Load the target in 8 or 4 bit (default: as it is).")
    ] = None
    gguf_file: Annotated[str | None, typer.Option(help="Load this GGUF file of the target's folder.")] = None
    device: Annotated[
        str | None, typer.Option(help="Device of the target (default: the accelerator, else the CPU).")
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads (default: torch's choice).")] = None
    engine: Annotated[
        EngineName,
        typer.Option(
            help="Where answers are computed: in this process, on a Ray cluster, or by an OpenAI-compatible server."
        ),
    ] = "local"
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help=f"Address for --engine server; the key is read from {KEY_VARIABLE}."),
    ] = None
    server_model: Annotated[
        str | None, typer.Option(help="Name of the model on the server (default: its only model).")
    ] = None
    concurrency: Annotated[int, typer.Option(min=1, help="Send this many requests to the server at once.")] = 32
    request_timeout: Annotated[
        float, typer.Option(min=1, help="End an attempt after this many seconds without a byte of the answer.")
    ] = 600.0
    retries: Annotated[int, typer.Option(min=0, help="Retry a failed request (or Ray batch) this many times.")] = 5
    actors: Annotated[
        int, typer.Option(min=1, help="Number of actors for --engine ray; each loads target and speculator.")
    ] = 1
    actor_cpus: Annotated[float, typer.Option(min=0, help="CPUs of each actor.")] = 1.0
    actor_gpus: Annotated[float, typer.Option(min=0, help="GPUs of each actor.")] = 0.0

    def __post_init__(self) -> None:
        if (self.data is None) == (self.self_prompts is None):
            raise SpeculateError("pass the prompts to answer: either --data or --self-prompts.")
        if self.self_prompts is not None and self.engine != "local":
            raise SpeculateError(
                f"--self-prompts does not work with --engine {self.engine}: write the prompts with --engine local "
                "first."
            )
        if (self.server is None) == (self.engine == "server"):
            raise SpeculateError("--server is required with --engine server, and only allowed there.")
        self.columns = dict(map(_renaming, self.column or ()))

    @property
    def drafter(self) -> str | None:
        """The speculator as a text; None if drafting is off."""
        return {"none": None, "auto": "prompt_lookup"}.get(self.speculator, self.speculator)


def _renaming(pair: str) -> tuple[str, str]:
    """The two names of an `OURS=THEIRS` pair."""
    ours, equals, theirs = pair.partition("=")
    if not (ours and equals and theirs):
        raise SpeculateError(f"cannot read --column {pair!r}: it must be OURS=THEIRS, e.g. prompt=question.")
    return ours, theirs
