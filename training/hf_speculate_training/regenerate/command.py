"""`hf-speculate regenerate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import torch
import typer
from torch import nn
from transformers.utils import logging

from hf_speculate.commands import make_spec, parse_spec, read_prompts, say_json
from hf_speculate.errors import SpeculateError
from hf_speculate.models import unwrap
from hf_speculate.speculator import Speculator

from ..data import HeldOut, load_records
from ..target import DtypeName, QuantizationName, TargetSection, load_config, load_target, load_tokenizer
from .cluster import RayEngine
from .connection import KEY_VARIABLE, Connection
from .engine import Engine, LocalEngine
from .planning import Planner, RegenerateOptions
from .self_prompts import SelfPromptOptions, write_self_prompts
from .server import ServerEngine
from .writing import write_answers


EngineName: TypeAlias = Literal["local", "ray", "server"]


def regenerate_command(
    target: Annotated[str, typer.Option(help="Model that writes: path or Hub id.")],
    output: Annotated[
        Path, typer.Option(help="Write answers to this JSON-lines file; a run that was stopped goes on with it.")
    ],
    data: Annotated[
        str | None, typer.Option(help="Prompts: json, jsonl, parquet, csv or text file, folder, pattern, or Hub id.")
    ] = None,
    self_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Draw this many prompts from the target itself (a chat model) instead of --data."),
    ] = None,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(help="Skip prompts like those of this JSON-lines file, kept for measuring (repeatable)."),
    ] = None,
    speculator: Annotated[
        str,
        typer.Option(
            "--speculator", "-s", help="Drafter: auto (prompt_lookup), none, or NAME_OR_PATH:option=value,..."
        ),
    ] = "auto",
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Sample at this temperature; 0 is greedy (default: the model's own settings)."),
    ] = None,
    top_p: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Sample from the likeliest tokens of this total probability; with --temperature."
        ),
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from this many likeliest tokens; 0 is all; with --temperature.")
    ] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop an answer after this many tokens.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Answer this many prompts at a time.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Answer only the first records (default: all).")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(help="Rename a column of the data: OURS=THEIRS, e.g. prompt=question (repeatable)."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take a prompt that is a mere text as a user's message.")
    ] = False,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Keep this many tokens of a plain text; the target goes on from there.")
    ] = 64,
    pieces: Annotated[
        bool, typer.Option("--pieces", help="Cut plain texts into pieces, and go on from the start of each.")
    ] = False,
    split: Annotated[str, typer.Option(help="Split of Hub data.")] = "train",
    config: Annotated[str | None, typer.Option(help="Configuration of Hub data.")] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the target.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Put this PEFT adapter on the target.")] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Dtype of the target; auto is the checkpoint's.")] = "auto",
    quantization: Annotated[QuantizationName | None, typer.Option(help="Load the target in 8 or 4 bit.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="Load this GGUF file of the target's folder.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the target (default: the accelerator if there is one).")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of torch.")] = None,
    engine: Annotated[
        EngineName, typer.Option(help="Answer in this process, by actors of a Ray cluster, or by a server.")
    ] = "local",
    server: Annotated[
        str | None, typer.Option(metavar="URL", help=f"Address for --engine server; its key comes from {KEY_VARIABLE}.")
    ] = None,
    server_model: Annotated[
        str | None, typer.Option(help="Name of the model on the server (default: the only one).")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Send this many requests to the server at a time.")] = 32,
    request_timeout: Annotated[
        float, typer.Option(min=1, help="Wait this many seconds for a whole answer of the server.")
    ] = 600.0,
    retries: Annotated[int, typer.Option(min=0, help="Retry a failed request (or Ray batch) this many times.")] = 5,
    actors: Annotated[
        int, typer.Option(min=1, help="Start this many actors for --engine ray; each holds target and speculator.")
    ] = 1,
    actor_cpus: Annotated[float, typer.Option(min=0, help="CPUs of each actor.")] = 1.0,
    actor_gpus: Annotated[float, typer.Option(min=0, help="GPUs of each actor.")] = 0.0,
) -> None:
    """Have the target answer the prompts of a dataset (or its own), as training data for its head."""
    if (data is None) == (self_prompts is None):
        raise SpeculateError("give the prompts to answer: either --data or --self-prompts.")
    if self_prompts is not None and engine != "local":
        raise SpeculateError(f"--self-prompts draws questions here, not with --engine {engine}: draw them first.")
    if (server is None) == (engine == "server"):
        raise SpeculateError("--engine server wants --server URL, and nobody else does.")
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
        columns = column_names(column or ())
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
        drafting, served = _speculator(speculator, model), unwrap(model).config
        if self_prompts is not None:
            drawing = SelfPromptOptions(count=self_prompts, batch_size=batch_size, seed=seed)
            drawn = output.with_name(output.name + ".prompts")  # another suffix: these are no training data
            records, dropped = write_self_prompts(model, tokenizer, drawn, drawing, speculator=drafting)
            options = replace(options, chat=True)
        answering = LocalEngine(model, tokenizer, options, drafting)
    assert records is not None
    report = write_answers(answering, Planner(tokenizer, served, options, held_out), records, output)
    counted = {"skipped": dict(report.skipped), "dropped_prompts": dict(dropped)}
    figures = vars(report) | counted | {"output": str(output)}
    if (length := answering.mean_acceptance_length()) is not None:
        figures["mean_acceptance_length"] = length
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
    if name is None and torch.accelerator.is_available():
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device(name or "cpu")


def _speculator(text: str, model: nn.Module) -> Speculator | None:
    if text == "none":
        return None
    return make_spec(parse_spec(_spec(text)), unwrap(model))


def _spec(text: str) -> str:
    return "prompt_lookup" if text == "auto" else text
