"""`hf-speculate regenerate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from hf_speculate.errors import SpeculateError
from hf_speculate_tools.commands import (
    check_prompts,
    checked,
    new_tokens_option,
    parse_spec,
    read_prompts,
    say,
    say_json,
    speculator_option,
    target_option,
    temperature_option,
)

from ..names import DtypeName, QuantizationName, check_source
from .connection import KEY_VARIABLE


if TYPE_CHECKING:
    import torch

    from hf_speculate.speculator import Speculator
    from hf_speculate.target import GenerativeModel

    from .engine import Engine


EngineName: TypeAlias = Literal["local", "ray", "server"]


def regenerate_command(
    target: Annotated[str, target_option("Model that writes the answers: folder or Hub id.")],
    output: Annotated[Path, typer.Option(help="JSON-lines file for the answers. Run the command again to resume.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Prompts: a json, jsonl, parquet, csv or text file, a folder, a pattern, or a Hub id.",
            callback=checked(check_source),
        ),
    ] = None,
    self_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Instead of --data, let the target (a chat model) write this many prompts itself."),
    ] = None,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(
            help="Skip prompts that resemble those of this JSON-lines file, e.g. of a benchmark (repeatable).",
            callback=checked(check_prompts),
        ),
    ] = None,
    speculator: Annotated[
        str,
        speculator_option(
            "Drafter: auto (prompt_lookup), none, or a name or head's folder as NAME:option=value,...", "auto", "none"
        ),
    ] = "auto",
    temperature: Annotated[
        float | None,
        temperature_option("Sample at this temperature; 0 is greedy (default: the model's own settings).", 0),
    ] = None,
    top_p: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Sample from the likeliest tokens that have this probability together; needs --temperature.",
        ),
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from the likeliest tokens, this many; 0 is all; needs --temperature.")
    ] = 0,
    max_new_tokens: Annotated[int, new_tokens_option("Stop an answer after this many tokens.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Answer this many prompts at once.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Answer only this many records, the first ones (default: all).")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(help="Rename a column of the data: OURS=THEIRS, e.g. prompt=question (repeatable)."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Wrap prompts that are plain text as a user's chat message.")
    ] = False,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Keep this many tokens of a plain text; the target continues it.")
    ] = 64,
    pieces: Annotated[
        bool, typer.Option("--pieces", help="Cut plain texts into pieces; the target continues the start of each.")
    ] = False,
    split: Annotated[str, typer.Option(help="Split of a Hub dataset.")] = "train",
    config: Annotated[
        str | None, typer.Option(help="Configuration of a Hub dataset (default: the dataset's own).")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Revision of the target on the Hub (default: the newest).")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="Load this PEFT adapter into the target (default: none).")] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Dtype of the target; auto is the checkpoint's.")] = "auto",
    quantization: Annotated[
        QuantizationName | None, typer.Option(help="Load the target in 8 or 4 bit (default: as it is).")
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="Load this GGUF file of the target's folder.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the target (default: the accelerator, else the CPU).")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads (default: torch's choice).")] = None,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="Where answers are computed: in this process, on a Ray cluster, or by an OpenAI-compatible server."
        ),
    ] = "local",
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help=f"Address for --engine server; the key is read from {KEY_VARIABLE}."),
    ] = None,
    server_model: Annotated[
        str | None, typer.Option(help="Name of the model on the server (default: its only model).")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Send this many requests to the server at once.")] = 32,
    request_timeout: Annotated[
        float, typer.Option(min=1, help="End an attempt after this many seconds without a byte of the answer.")
    ] = 600.0,
    retries: Annotated[int, typer.Option(min=0, help="Retry a failed request (or Ray batch) this many times.")] = 5,
    actors: Annotated[
        int, typer.Option(min=1, help="Number of actors for --engine ray; each loads target and speculator.")
    ] = 1,
    actor_cpus: Annotated[float, typer.Option(min=0, help="CPUs of each actor.")] = 1.0,
    actor_gpus: Annotated[float, typer.Option(min=0, help="GPUs of each actor.")] = 0.0,
) -> None:
    """Write training data: the target's own answers to prompts.

    Prompts come from a dataset, or from the target itself. Run the command again to resume.
    """
    if (data is None) == (self_prompts is None):
        raise SpeculateError("pass the prompts to answer: either --data or --self-prompts.")
    if self_prompts is not None and engine != "local":
        raise SpeculateError(
            f"--self-prompts does not work with --engine {engine}: write the prompts with --engine local first."
        )
    if (server is None) == (engine == "server"):
        raise SpeculateError("--server is required with --engine server, and only allowed there.")
    columns = column_names(column or ())
    import torch
    from transformers.utils import logging

    from ..data import HeldOut, load_records
    from ..target import TargetSection, load_config, load_target, load_tokenizer
    from .cluster import RayEngine
    from .connection import Connection
    from .engine import LocalEngine
    from .planning import Planner, RegenerateOptions
    from .self_prompts import SAMPLING, write_self_prompts
    from .server import ServerEngine
    from .writing import write_answers

    options = RegenerateOptions(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        prompt_tokens=prompt_tokens,
        pieces=pieces,
        chat=chat,
    )
    records = None
    if data is not None:
        records = load_records(data, split=split, config=config, columns=columns, limit=limit)
    held_out = HeldOut(_texts(exclude)) if exclude else None
    if threads is not None:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()  # of transformers: "Loading weights"
    section = TargetSection(
        path=target,
        revision=revision,
        dtype=dtype,
        quantization=quantization,
        gguf_file=gguf_file,
        adapter=adapter,
    )
    tokenizer = load_tokenizer(section)
    dropped: Mapping[str, int] = {}
    if engine == "server":
        assert server is not None
        connection, served = Connection(server, timeout=request_timeout, retries=retries), load_config(section)
        answering: Engine = ServerEngine(
            connection, tokenizer, served, options, model=server_model, concurrency=concurrency
        )
    elif engine == "ray":
        served, spec = load_config(section), None if speculator == "none" else _spec(speculator)
        answering = RayEngine(section, options, spec, actors=actors, cpus=actor_cpus, gpus=actor_gpus, retries=retries)
    else:
        model = load_target(section, _device(device))
        drafting, served = _speculator(speculator, model), model.config
        if self_prompts is not None:
            drawing = replace(SAMPLING, batch_size=batch_size, seed=seed)
            drawn = output.with_name(output.name + ".prompts")  # another suffix: these are not training data
            records, dropped = write_self_prompts(model, tokenizer, drawn, self_prompts, drawing, speculator=drafting)
            options = replace(options, chat=True)
        answering = LocalEngine(model, tokenizer, options, drafting)
    assert records is not None
    report = write_answers(answering, Planner(tokenizer, served, options, held_out), records, output)
    counted = {"skipped": dict(report.skipped), "dropped_prompts": dict(dropped)}
    figures = vars(report) | counted | {"output": str(output)}
    if (length := answering.mean_acceptance_length()) is not None:
        figures["mean_acceptance_length"] = length
    if advice := report.advice(options):
        say(advice, err=True)
    say_json(figures)


def column_names(pairs: Iterable[str]) -> dict[str, str]:
    """`OURS=THEIRS` pairs as `load_records` wants them."""
    columns = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if not (ours and equals and theirs):
            raise SpeculateError(f"cannot read --column {pair!r}: it must be OURS=THEIRS, e.g. prompt=question.")
        columns[ours] = theirs
    return columns


def _texts(paths: Iterable[Path]) -> Iterator[str]:
    """Users' messages of prompt files."""
    for prompt in (prompt for path in paths for prompt in read_prompts(path)):
        yield from (message["content"] for message in prompt.messages if message["role"] == "user")
        yield from prompt.later_turns


def _device(name: str | None) -> torch.device:
    import torch

    if name is None and torch.accelerator.is_available():
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device(name or "cpu")


def _speculator(text: str, model: GenerativeModel) -> Speculator | None:
    if text == "none":
        return None
    from hf_speculate_tools.commands import make_spec

    return make_spec(parse_spec(_spec(text)), model)


def _spec(text: str) -> str:
    return "prompt_lookup" if text == "auto" else text
